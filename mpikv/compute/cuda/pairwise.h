// Sums of many numbers in the order of numpy, by the threads of a block together: so they have numpy's bits.
//
// numpy halves what it adds up until at most LEAF elements are left, of which every eighth goes to one of eight sums.
// It does so in float64 for cells of CELL elements, one after the other (mpikv/optimizers/parts.py). A block of a GPU has
// what is left of a cell after HALVINGS, a piece, so that many are at work for few cells. Two threads have a leaf, each
// four of its sums: then a group of numbers is a thread's.

enum { CELL = 1 << 16, HALVINGS = 2, PIECES = 1 << HALVINGS, LEAF = 128, LANES = 8, LEAVES = 1 << 8, BLOCK_THREADS = 256 };

#ifdef __CUDACC__

#define SHARED __shared__

// Have every thread of the block do something, and wait for all of them.
template <class Work> INNER void all_threads(const Work& work) {
    work(threadIdx.x);
    __syncthreads();
}

#else

#define SHARED static

// Here a thread comes to its end before the next one begins: the first does the work of all.
template <class Work> INNER void all_threads(const Work& work) {
    if (threadIdx.x == 0) {
        for (unsigned int thread = 0; thread < blockDim.x; thread++) {
            threadIdx.x = thread;
            work(thread);
        }
        threadIdx.x = 0;
    }
    phase = phase + 1;
}

#endif

struct Two {
    double first, second;
};

// Elements that are added up, counted in their cell.
struct Node {
    int begin, size;
};

INNER int left_half(int size) { return size / 2 - size / 2 % LANES; }

// Return how often a cell is halved, at most: the right part is never the smaller one.
INNER int depth_of(int size) {
    int depth = 0;
    for (; size > LEAF; depth++) size -= left_half(size);
    return depth;
}

// Return a part after so many halvings, by its number from the left. What is not halved any more is the first of its
// parts, and the others are empty.
INNER Node part_of(int size, int halvings, int number) {
    Node node = {0, size};
    for (int bit = halvings - 1; bit >= 0; bit--) {
        const bool right = number >> bit & 1;
        const int left = node.size > LEAF ? left_half(node.size) : node.size;
        if (right) {
            node.begin += left;
            node.size -= left;
        } else {
            node.size = left;
        }
    }
    return node;
}

INNER Two operator+(Two left, Two right) {
    const Two sum = {left.first + right.first, left.second + right.second};
    return sum;
}

// What the threads of a block tell each other: of two sums that are made at once.
struct Board {
    Two leaf[LEAVES];
    Two lanes[BLOCK_THREADS];
    Two rest[LANES];
};

// Put both sums of the elements of a piece in the board's first leaf. `visit(i, count, found)` finds what there is to add
// of `count` elements from the `i`th of the cell on, which are four but at its end. Every element is visited once. Nothing
// that is added is negative.
template <class Visit> INNER void add_up(int size, int piece, Board& board, const Visit& visit) {
    const Node all = part_of(size, HALVINGS, piece);
    const int depth = depth_of(all.size), leaves = 1 << depth;
    for (int first = 0; first < leaves; first += BLOCK_THREADS * GROUP / LANES) {
        all_threads([&](unsigned int thread) {
            const int number = first + (int)thread * GROUP / LANES, lane = (int)thread * GROUP % LANES;
            if (number >= leaves) return;
            const Node leaf = part_of(all.size, depth, number);
            const int begin = all.begin + leaf.begin, rest = leaf.size % LANES, whole = leaf.size - rest;
            Two sum[GROUP] = {}, found[GROUP];
            for (int i = lane; i < whole; i += LANES) {
                visit(begin + i, GROUP, found);
                for (int k = 0; k < GROUP; k++) sum[k] = sum[k] + found[k];
            }
            board.lanes[thread] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
            if (lane >= rest) return;
            // Of the last leaf: what is on the left of a half is a multiple of LANES.
            const int count = rest - lane < GROUP ? rest - lane : GROUP;
            visit(begin + whole + lane, count, found);
            for (int k = 0; k < count; k++) board.rest[lane + k] = found[k];
        });
        all_threads([&](unsigned int thread) {
            const int number = first + (int)thread;
            if (thread >= BLOCK_THREADS * GROUP / LANES || number >= leaves) return;
            Two sum = board.lanes[2 * thread] + board.lanes[2 * thread + 1];
            const int rest = part_of(all.size, depth, number).size % LANES;
            for (int i = 0; i < rest; i++) sum = sum + board.rest[i];
            board.leaf[number] = sum;
        });
    }
    for (int halvings = depth - 1; halvings >= 0; halvings--) {
        const int apart = 1 << (depth - halvings - 1);
        all_threads([&](unsigned int thread) {
            const int number = (int)thread;
            if (number >= 1 << halvings || part_of(all.size, halvings, number).size <= LEAF) return;
            Two& sum = board.leaf[2 * apart * number];
            sum = sum + board.leaf[2 * apart * number + apart];
        });
    }
}

// Return how many elements a cell has that begins there.
INNER int cell_size(long long begin, long long size) {
    const long long left = size - begin;
    return left < CELL ? (int)left : (int)CELL;
}

// Add up the piece of this block, and put its sums where they belong. `number` counts the cells of all arrays.
template <class Visit> INNER void add_up_piece(int size, double* sums, const Visit& visit) {
    SHARED Board board;
    add_up(size, (int)(blockIdx.x % PIECES), board, visit);
    all_threads([&](unsigned int thread) {
        if (thread) return;
        sums[2 * (long long)blockIdx.x] = board.leaf[0].first;
        sums[2 * (long long)blockIdx.x + 1] = board.leaf[0].second;
    });
}

// Return the sums of a cell.
INNER Two sums_of(const double* sums, long long cell) {
    const Two* piece = (const Two*)sums + PIECES * cell;
    return (piece[0] + piece[1]) + (piece[2] + piece[3]);
}

// Sums of many numbers in the order of numpy, by the threads of a block together: so they have numpy's bits.
//
// numpy halves what it adds up until at most LEAF elements are left, of which every eighth goes to one of eight sums.
// It does so in float64 for blocks of CELL elements, one after the other (mpikv/optimizers/parts.py): a block of a GPU
// has a cell. Eight threads have a leaf.

enum { CELL = 1 << 16, LEAF = 128, LANES = 8, LEAVES = 1 << 10, BLOCK_THREADS = 256 };

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
    if (threadIdx.x == 0)
        for (unsigned int thread = 0; thread < blockDim.x; thread++) work(thread);
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

// What the threads of a block tell each other: of two sums that are made at once.
struct Board {
    Two leaf[LEAVES];
    Two lane[BLOCK_THREADS];
    Two rest[BLOCK_THREADS];
};

INNER Two operator+(Two left, Two right) {
    const Two sum = {left.first + right.first, left.second + right.second};
    return sum;
}

// Put both sums of `visit(i)`, for every i below `size`, in the board's first leaf. Every i is visited once. Nothing
// that is added is negative.
template <class Visit> INNER void add_up(int size, Board& board, const Visit& visit) {
    const int depth = depth_of(size), leaves = 1 << depth;
    for (int first = 0; first < leaves; first += BLOCK_THREADS / LANES) {
        all_threads([&](unsigned int thread) {
            const int number = first + (int)thread / LANES, lane = (int)thread % LANES;
            if (number >= leaves) return;
            const Node leaf = part_of(size, depth, number);
            const int whole = leaf.size - leaf.size % LANES;
            Two sum = {0, 0};
            for (int i = lane; i < whole; i += LANES) sum = sum + visit(leaf.begin + i);
            board.lane[thread] = sum;
            if (whole + lane < leaf.size) board.rest[thread] = visit(leaf.begin + whole + lane);
        });
        all_threads([&](unsigned int thread) {
            const int number = first + (int)thread / LANES;
            if (number >= leaves || thread % LANES) return;
            const Two* lane = board.lane + thread;
            Two sum = ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
            const int rest = part_of(size, depth, number).size % LANES;
            for (int i = 0; i < rest; i++) sum = sum + board.rest[thread + i];
            board.leaf[number] = sum;
        });
    }
    for (int halvings = depth - 1; halvings >= 0; halvings--) {
        const int apart = 1 << (depth - halvings - 1);
        all_threads([&](unsigned int thread) {
            for (int number = (int)thread; number < 1 << halvings; number += BLOCK_THREADS) {
                if (part_of(size, halvings, number).size <= LEAF) continue;
                Two& sum = board.leaf[2 * apart * number];
                sum = sum + board.leaf[2 * apart * number + apart];
            }
        });
    }
}

// Return how many elements a cell has that begins there.
INNER int cell_size(long long begin, long long size) {
    const long long left = size - begin;
    return left < CELL ? (int)left : (int)CELL;
}

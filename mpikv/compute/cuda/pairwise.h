// Sums of many numbers in the order of numpy, by the threads of a block together: so they have numpy's bits.
//
// numpy halves what it adds up until at most LEAF elements are left, of which every eighth goes to one of eight sums.
// It does so in float64 for cells of CELL elements, one after the other (mpikv/optimizers/parts.py). A block of a GPU has
// what is left of a cell after HALVINGS, a piece, so that many are at work for few cells.

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

// Put the sums of a piece's leaves in a row. `visit(i, count, found)` finds what there is to add of `count` elements from
// the `i`th of the cell on, which are four but at its end. Every element is visited once. Nothing that is added is
// negative. Two threads have a leaf, each four of its sums: then a group of numbers is a thread's.
template <class Visit> INNER void add_up_leaves(const Node& piece, int depth, Two* sums, const Visit& visit) {
    SHARED Two lanes[BLOCK_THREADS], rest_of_last[LANES];
    const int leaves = 1 << depth;
    for (int first = 0; first < leaves; first += BLOCK_THREADS * GROUP / LANES) {
        all_threads([&](unsigned int thread) {
            const int number = first + (int)thread * GROUP / LANES, lane = (int)thread * GROUP % LANES;
            if (number >= leaves) return;
            const Node leaf = part_of(piece.size, depth, number);
            const int begin = piece.begin + leaf.begin, rest = leaf.size % LANES, whole = leaf.size - rest;
            Two sum[GROUP] = {}, found[GROUP];
            for (int i = lane; i < whole; i += LANES) {
                visit(begin + i, GROUP, found);
                for (int k = 0; k < GROUP; k++) sum[k] = sum[k] + found[k];
            }
            lanes[thread] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
            if (lane >= rest) return;
            // Of the last leaf: what is on the left of a half is a multiple of LANES.
            const int count = rest - lane < GROUP ? rest - lane : GROUP;
            visit(begin + whole + lane, count, found);
            for (int k = 0; k < count; k++) rest_of_last[lane + k] = found[k];
        });
        all_threads([&](unsigned int thread) {
            const int number = first + (int)thread;
            if (thread >= BLOCK_THREADS * GROUP / LANES || number >= leaves) return;
            Two sum = lanes[2 * thread] + lanes[2 * thread + 1];
            const int rest = part_of(piece.size, depth, number).size % LANES;
            for (int i = 0; i < rest; i++) sum = sum + rest_of_last[i];
            sums[number] = sum;
        });
    }
}

template <class T> struct Pair { T first, second; };

INNER Two squares_of(double first, double second) {
    const Two squares = {first * first, second * second};
    return squares;
}

// The same with the squares of two numbers of each element, where more than these is read and written: here threads side
// by side visit neighbours, as memory likes it. The numbers wait in shared memory for the threads that add them up, of
// which each has one sum of a leaf.
template <class T, class Visit> INNER void add_up_squares(const Node& piece, int depth, Two* sums, const Visit& visit) {
    // Leaves at a time, and how far apart the numbers of a group wait: so far that threads side by side use other banks.
    enum { ROUND = LEAF / sizeof(T), APART = ROUND * LEAF / GROUP + 2 };
    SHARED Pair<T> waiting[GROUP * APART];
    SHARED Two lanes[ROUND * LANES];
    const int leaves = 1 << depth;
    for (int first = 0; first < leaves; first += ROUND) {
        const int behind = first + ROUND < leaves ? first + ROUND : leaves;
        const Node last = part_of(piece.size, depth, behind - 1);
        const int begin = part_of(piece.size, depth, first).begin, end = last.begin + last.size;
        const auto number_at = [&](int i) -> Pair<T>& { return waiting[(i - begin) % GROUP * APART + (i - begin) / GROUP]; };
        const auto squares_at = [&](int i) { return squares_of(number_at(i).first, number_at(i).second); };
        all_threads([&](unsigned int thread) {
            for (int i = begin + GROUP * (int)thread; i < end; i += GROUP * BLOCK_THREADS) {
                const int count = end - i < GROUP ? end - i : (int)GROUP;
                Pair<T> found[GROUP];
                visit(piece.begin + i, count, found);
                for (int k = 0; k < count; k++) number_at(i + k) = found[k];
            }
        });
        all_threads([&](unsigned int thread) {
            const int number = first + (int)thread / LANES;
            if (number >= behind) return;
            const Node leaf = part_of(piece.size, depth, number);
            const int whole = leaf.size - leaf.size % LANES;
            Two sum = {0, 0};
            for (int i = (int)thread % LANES; i < whole; i += LANES) sum = sum + squares_at(leaf.begin + i);
            lanes[thread] = sum;
        });
        all_threads([&](unsigned int thread) {
            const int number = first + (int)thread;
            if (number >= behind) return;
            const Node leaf = part_of(piece.size, depth, number);
            const Two* lane = lanes + LANES * thread;
            Two sum = ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
            for (int i = leaf.size - leaf.size % LANES; i < leaf.size; i++) sum = sum + squares_at(leaf.begin + i);
            sums[number] = sum;
        });
    }
}

// Return how many elements a cell has that begins there.
INNER int cell_size(long long begin, long long size) {
    const long long left = size - begin;
    return left < CELL ? (int)left : (int)CELL;
}

// Add up the piece of this block, of a cell of so many elements, and put its two sums at `sums`. `add(piece, depth, leaf)`
// puts the sums of its leaves in a row.
template <class Add> INNER void add_up_piece(int size, double* sums, const Add& add) {
    SHARED Two leaf[LEAVES];
    const Node piece = part_of(size, HALVINGS, (int)(blockIdx.x % PIECES));
    const int depth = depth_of(piece.size);
    add(piece, depth, leaf);
    for (int halvings = depth - 1; halvings >= 0; halvings--) {
        const int apart = 1 << (depth - halvings - 1);
        all_threads([&](unsigned int thread) {
            const int number = (int)thread;
            if (number >= 1 << halvings || part_of(piece.size, halvings, number).size <= LEAF) return;
            Two& sum = leaf[2 * apart * number];
            sum = sum + leaf[2 * apart * number + apart];
        });
    }
    all_threads([&](unsigned int thread) {
        if (thread) return;
        sums[0] = leaf[0].first;
        sums[1] = leaf[0].second;
    });
}

// Return the sums of a cell.
INNER Two sums_of(const double* sums, long long cell) {
    const Two* piece = (const Two*)sums + PIECES * cell;
    return (piece[0] + piece[1]) + (piece[2] + piece[3]);
}

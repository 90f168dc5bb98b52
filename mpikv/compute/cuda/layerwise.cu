// The optimizers whose rate depends on the norms of whole values, layers (mpikv/optimizers/layerwise.py).
//
// An update of some layers is three launches, each by its part of the rule. In the first each block makes the directions
// of a piece of a cell, and adds up its squares. In the second a block finds the rate of a layer from its cells. The third
// descends.

enum { LAYERS = 44, ROWS = 14, LAYER_STATES = 2, PART = 1 << 12 };

// What each launch is given, by value: at most 4096 bytes. loading.py reads its fields here.
struct Layers {
    void* total[LAYERS];
    void* value[LAYERS];
    void* master[LAYERS];  // null where the value is all there is
    void* state[LAYER_STATES * LAYERS];  // of all layers the first one, then the second one
    long long size[LAYERS];
    long long end[LAYERS];  // the cells of this layer and those before it
    int row[LAYERS];
    double numbers[ROWS * NUMBERS];
    double* sums;  // two for each piece of a cell, and then the rate of each layer
    long long count;
};

INNER long long first_cell(const Layers& given, int number) { return number ? given.end[number - 1] : 0; }

INNER const double* row_of(const Layers& given, int number) { return given.numbers + given.row[number] * NUMBERS; }

// The elements of a layer from one on.
template <template <class> class Rule, class Kind>
INNER Elements<Rule, Kind> elements_of(const Layers& given, int number, long long low) {
    return Elements<Rule, Kind>(given.total[number], given.value[number], given.master[number],
                                [&](int s) { return given.state[s * LAYERS + number]; }, low, row_of(given, number));
}

// How many blocks a multiprocessor has room for, which limits the registers of a thread: memory is busy only while many
// are at work.
template <class Kind> struct Resident { enum { blocks = sizeof(typename Kind::computed) == 8 ? 2 : 4 }; };

template <template <class> class Rule, class Kind> __global__ void LAUNCH_BOUNDS(BLOCK_THREADS, Resident<Kind>::blocks)
norms(const GRID_CONSTANT Layers given) {
    typedef typename Kind::computed T;
    const long long cell = blockIdx.x / PIECES;
    const int number = range_of(given.end, given.count, cell);
    const long long begin = (cell - first_cell(given, number)) * CELL;
    const Elements<Rule, Kind> all = elements_of<Rule, Kind>(given, number, begin);
    const auto visit = [&](int i, int count, Pair<T>* found) {
        const Places places = group_of(i, count, all.aligned);
        Taken<Rule, Kind> taken(all, places);
        taken.update(all);
        for (int k = 0; k < GROUP; k++) {
            found[k].first = taken.weight.number[k];
            found[k].second = taken.gradient.number[k];
        }
        taken.keep_states(all, places);
        if (Rule<T>::directs) write(taken.gradient, all.total, places);
    };
    const int size = cell_size(begin, given.size[number]);
    add_up_piece(size, given.sums + 2 * (long long)blockIdx.x, [&](const Node& piece, int depth, Two* leaf) {
        add_up_squares<T>(piece, depth, leaf, visit);
    });
}

// Return the norms of this block's layer, to its first thread. Its cells are added up in their order, by one thread, to
// which the others bring them.
INNER Two norms_of(const Layers& given) {
    SHARED Two cells[BLOCK_THREADS];
    const long long begin = first_cell(given, (int)blockIdx.x), end = given.end[blockIdx.x];
    Two squares = {0, 0};
#pragma unroll 1
    for (long long first = begin; first < end; first += BLOCK_THREADS) {
        const int count = end - first < BLOCK_THREADS ? (int)(end - first) : (int)BLOCK_THREADS;
        all_threads([&](unsigned int thread) {
            if ((int)thread < count) cells[thread] = sums_of(given.sums, first + thread);
        });
        all_threads([&](unsigned int thread) {
            if (thread) return;
            for (int cell = 0; cell < count; cell++) squares = squares + cells[cell];
        });
    }
    const Two norms = {root(squares.first), root(squares.second)};
    return norms;
}

INNER double* rates_of(const Layers& given) { return given.sums + 2 * PIECES * given.end[given.count - 1]; }

template <template <class> class Rule> __global__ void rates(const GRID_CONSTANT Layers given) {
    const Two norms = norms_of(given);
    if (threadIdx.x) return;
    double rate = norms.first, gradient = norms.second;
    Rule<double>::update(rate, gradient, 0, 0, row_of(given, (int)blockIdx.x) + 1);
    rates_of(given)[blockIdx.x] = rate;
}

// `place` is that of the rate among the rule's numbers.
template <template <class> class Rule, class Kind, int place> __global__ void descent(const GRID_CONSTANT Layers given) {
    const long long parts = CELL / PART;
    const int number = range_of(given.end, given.count, blockIdx.x / parts);
    const long long low = (blockIdx.x - first_cell(given, number) * parts) * PART;
    const long long left = given.size[number] - low;
    Elements<Rule, Kind> all = elements_of<Rule, Kind>(given, number, low);
    all.n[place] = (typename Kind::computed)rates_of(given)[number];
    walk(all, left < PART ? (int)left : (int)PART);
}

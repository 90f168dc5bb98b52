// The optimizers whose rate depends on the norms of whole values, layers: LARS and LAMB
// (mpikv/optimizers/layerwise.py).
//
// An update of some layers is three launches. In the first each block adds up the squares of a piece of a cell; LAMB makes
// its directions there, which take the place of the sum of the push. In the second a block finds the rate of a layer from
// its cells. The third descends. Every operation is that of the rule in numpy, as in rules.cu.

enum { LAYERS = 44, NUMBERS = 8, DESCENT_PART = 1 << 12 };

// What each launch is given, by value: at most 4096 bytes. mpikv/compute/cuda/layerwise.py has the same.
struct Layers {
    void* total[LAYERS];
    void* value[LAYERS];
    void* master[LAYERS];  // null where the value is all there is
    void* first[LAYERS];   // LARS: the momentum, or null without one. LAMB: the mean
    void* second[LAYERS];  // LAMB: the variance
    long long size[LAYERS];
    long long end[LAYERS];  // the cells of this layer and those before it
    double rate[LAYERS];
    double wd[LAYERS];
    double one[LAYERS];    // LARS: the trust, below 0 where it is to be found. LAMB: the epsilon of this update
    double other[LAYERS];  // LAMB: the factor of the direction in this update
    double numbers[NUMBERS];
    double* sums;  // two for each piece of a cell, and then the rate of each layer
    long long count;
};

// The arrays of a layer from an element on.
template <class Kind> struct Layer {
    typedef typename Kind::computed T;
    typedef typename Kind::stored Stored;
    T* total;
    Stored* value;
    T* master;
    T* first;
    T* second;
    T wd, scale, bound;
    bool decays, aligned;

    INNER Layer(const Layers& given, int number, long long begin)
        : total((T*)given.total[number] + begin),
          value((Stored*)given.value[number] + begin),
          master(from(given.master[number], begin)),
          first(from(given.first[number], begin)),
          second(from(given.second[number], begin)),
          wd(given.wd[number]),
          scale(given.numbers[0]),
          bound(given.numbers[1]),
          decays(given.wd[number] != 0),
          aligned(is_aligned(total) && is_aligned(value) && is_aligned(master) && is_aligned(first) &&
                  is_aligned(second)) {}

    static INNER T* from(void* array, long long begin) { return array ? (T*)array + begin : 0; }

    INNER Group<T> weights(const Places& places) const {
        if (master) return read(master, places);
        const Group<Stored> stored = read(value, places);
        Group<T> weight;
        for (int k = 0; k < GROUP; k++) weight.number[k] = Kind::widen(stored.number[k]);
        return weight;
    }
    INNER T gradient_of(T total) const { return clipped(total * scale, -bound, bound); }
    // Adding zero would make NaN of a weight that is inf.
    INNER T decayed(T gradient, T weight) const { return decays ? gradient + weight * wd : gradient; }
    INNER void change(const Group<T>& weight, const Places& places) const {
        if (master) write(weight, master, places);
        Group<Stored> stored;
        for (int k = 0; k < GROUP; k++) stored.number[k] = Kind::narrow(weight.number[k]);
        write(stored, value, places);
    }
};

INNER long long first_cell(const Layers& given, int number) { return number ? given.end[number - 1] : 0; }

INNER Two squares_of(double left, double right) {
    const Two two = {left * left, right * right};
    return two;
}

// Add up this block's piece: `visit(layer, places, found)` finds what there is to add of a group.
template <class Kind, class Visit> INNER void add_up_layer(const Layers& given, const Visit& visit) {
    const long long cell = blockIdx.x / PIECES;
    const int number = range_of(given.end, given.count, cell);
    const long long begin = (cell - first_cell(given, number)) * CELL;
    const Layer<Kind> layer(given, number, begin);
    add_up_piece(cell_size(begin, given.size[number]), given.sums, [&](int i, int count, Two* found) {
        visit(layer, number, group_of(i, count, layer.aligned), found);
    });
}

template <class Kind> __global__ void lars_norms(const GRID_CONSTANT Layers given) {
    typedef typename Kind::computed T;
    add_up_layer<Kind>(given, [&](const Layer<Kind>& layer, int, const Places& places, Two* found) {
        const Group<T> weight = layer.weights(places), total = read(layer.total, places);
        for (int k = 0; k < GROUP; k++) found[k] = squares_of(weight.number[k], total.number[k]);
    });
}

template <class Kind> __global__ void lamb_norms(const GRID_CONSTANT Layers given) {
    typedef typename Kind::computed T;
    const T kept = given.numbers[2], taken = given.numbers[3];
    const T kept_squares = given.numbers[4], taken_squares = given.numbers[5];
    add_up_layer<Kind>(given, [&](const Layer<Kind>& layer, int number, const Places& places, Two* found) {
        const T epsilon = given.one[number], factor = given.other[number];
        const Group<T> weights = layer.weights(places);
        Group<T> totals = read(layer.total, places), means = read(layer.first, places);
        Group<T> variances = read(layer.second, places);
        for (int k = 0; k < GROUP; k++) {
            const T weight = weights.number[k], gradient = layer.gradient_of(totals.number[k]);
            const T mean = means.number[k] * kept + gradient * taken;
            const T variance = variances.number[k] * kept_squares + gradient * gradient * taken_squares;
            const T direction = layer.decayed(mean / (root(variance) + epsilon) * factor, weight);
            means.number[k] = mean;
            variances.number[k] = variance;
            totals.number[k] = direction;
            found[k] = squares_of(weight, direction);
        }
        write(means, layer.first, places);
        write(variances, layer.second, places);
        write(totals, layer.total, places);
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

__global__ void lars_rates(const GRID_CONSTANT Layers given) {
    const Two norms = norms_of(given);
    if (threadIdx.x) return;
    const int number = (int)blockIdx.x;
    const double eta = given.numbers[3], epsilon = given.numbers[4], scale = given.numbers[5];
    const double weight = norms.first, gradient = norms.second * scale;
    double trust = given.one[number];
    if (trust < 0)
        trust = weight == 0 || gradient == 0 ? 1 : eta * weight / (gradient + given.wd[number] * weight + epsilon);
    rates_of(given)[number] = given.rate[number] * trust;
}

__global__ void lamb_rates(const GRID_CONSTANT Layers given) {
    const Two norms = norms_of(given);
    if (threadIdx.x) return;
    const int number = (int)blockIdx.x;
    const double lowest = given.numbers[6], highest = given.numbers[7];
    double weight = norms.first;
    if (lowest > weight) weight = lowest;
    if (highest < weight) weight = highest;
    const double trust = weight == 0 || norms.second == 0 ? 1 : weight / norms.second;
    rates_of(given)[number] = given.rate[number] * trust;
}

// Have `visit(layer, rate, places)` see to the groups of this block's part of a cell.
template <class Kind, class Visit> INNER void descend(const Layers& given, const Visit& visit) {
    const long long parts = CELL / DESCENT_PART;
    const int number = range_of(given.end, given.count, blockIdx.x / parts);
    const long long low = (blockIdx.x - first_cell(given, number) * parts) * DESCENT_PART;
    const long long left = given.size[number] - low;
    const Layer<Kind> layer(given, number, low);
    const typename Kind::computed rate = rates_of(given)[number];
    each_group(left < DESCENT_PART ? (int)left : (int)DESCENT_PART, layer.aligned,
               [&](const Places& places) { visit(layer, rate, places); });
}

template <class Kind> __global__ void lars_descent(const GRID_CONSTANT Layers given) {
    typedef typename Kind::computed T;
    const T momentum = given.numbers[2];
    descend<Kind>(given, [&](const Layer<Kind>& layer, T rate, const Places& places) {
        Group<T> weight = layer.weights(places), velocity = {};
        const Group<T> total = read(layer.total, places);
        if (layer.first) velocity = read(layer.first, places);
        for (int k = 0; k < GROUP; k++) {
            const T change = layer.decayed(layer.gradient_of(total.number[k]), weight.number[k]) * rate;
            if (layer.first) {
                velocity.number[k] = velocity.number[k] * momentum - change;
                weight.number[k] = weight.number[k] + velocity.number[k];
            } else {
                weight.number[k] = weight.number[k] - change;
            }
        }
        if (layer.first) write(velocity, layer.first, places);
        layer.change(weight, places);
    });
}

template <class Kind> __global__ void lamb_descent(const GRID_CONSTANT Layers given) {
    typedef typename Kind::computed T;
    descend<Kind>(given, [&](const Layer<Kind>& layer, T rate, const Places& places) {
        Group<T> weight = layer.weights(places);
        const Group<T> total = read(layer.total, places);
        for (int k = 0; k < GROUP; k++) weight.number[k] = weight.number[k] - total.number[k] * rate;
        layer.change(weight, places);
    });
}

// The optimizers whose rate depends on the norms of whole values, layers: LARS and LAMB
// (mpikv/optimizers/layerwise.py).
//
// An update of some layers is three launches. In the first each block adds up the squares of a cell; LAMB makes its
// directions there, which take the place of the sum of the push. The second finds the rate of each layer from its cells,
// one after the other. The third descends. Every operation is that of the rule in numpy, as in rules.cu.

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
    double* sums;  // two for each cell, and then the rate of each layer
    long long count;
};

template <class Kind> struct Layer {
    typedef typename Kind::computed T;
    T* total;
    typename Kind::stored* value;
    T* master;
    T* first;
    T* second;
    T wd, scale, bound;
    bool decays;

    INNER Layer(const Layers& given, int number)
        : total((T*)given.total[number]),
          value((typename Kind::stored*)given.value[number]),
          master((T*)given.master[number]),
          first((T*)given.first[number]),
          second((T*)given.second[number]),
          wd(given.wd[number]),
          scale(given.numbers[0]),
          bound(given.numbers[1]),
          decays(given.wd[number] != 0) {}

    INNER T weight(long long i) const { return master ? master[i] : Kind::widen(value[i]); }
    INNER T gradient(long long i) const { return clipped(total[i] * scale, bound); }
    INNER void change(long long i, T weight) const {
        if (master) master[i] = weight;
        value[i] = Kind::narrow(weight);
    }
};

INNER long long first_cell(const Layers& given, int number) { return number ? given.end[number - 1] : 0; }

INNER Two squares_of(double left, double right) {
    const Two two = {left * left, right * right};
    return two;
}

// Put the sums of `visit(i)` for the elements of this block's cell where they belong.
template <class Visit> INNER void add_up_cell(const Layers& given, int number, Board& board, const Visit& visit) {
    const long long begin = (blockIdx.x - first_cell(given, number)) * CELL;
    add_up(cell_size(begin, given.size[number]), board, [&](int i) { return visit(begin + i); });
    all_threads([&](unsigned int thread) {
        if (thread) return;
        given.sums[2 * (long long)blockIdx.x] = board.leaf[0].first;
        given.sums[2 * (long long)blockIdx.x + 1] = board.leaf[0].second;
    });
}

template <class Kind> __global__ void lars_norms(const GRID_CONSTANT Layers given) {
    SHARED Board board;
    const int number = range_of(given.end, given.count, blockIdx.x);
    const Layer<Kind> layer(given, number);
    add_up_cell(given, number, board, [&](long long i) { return squares_of(layer.weight(i), layer.total[i]); });
}

template <class Kind> __global__ void lamb_norms(const GRID_CONSTANT Layers given) {
    typedef typename Kind::computed T;
    SHARED Board board;
    const int number = range_of(given.end, given.count, blockIdx.x);
    const Layer<Kind> layer(given, number);
    const T kept = given.numbers[2], taken = given.numbers[3];
    const T kept_squares = given.numbers[4], taken_squares = given.numbers[5];
    const T epsilon = given.one[number], factor = given.other[number];
    add_up_cell(given, number, board, [&](long long i) {
        const T weight = layer.weight(i), gradient = layer.gradient(i);
        const T mean = averaged(layer.first[i], gradient, kept, taken);
        const T variance = averaged(layer.second[i], gradient * gradient, kept_squares, taken_squares);
        const T direction = decayed(mean / (root(variance) + epsilon) * factor, weight, layer.wd, layer.decays);
        layer.first[i] = mean;
        layer.second[i] = variance;
        layer.total[i] = direction;
        return squares_of(weight, direction);
    });
}

// Return the norms of a layer.
INNER Two norms_of(const Layers& given, int number) {
    Two squares = {0, 0};
    for (long long cell = first_cell(given, number); cell < given.end[number]; cell++) {
        const Two sums = {given.sums[2 * cell], given.sums[2 * cell + 1]};
        squares = squares + sums;
    }
    const Two norms = {root(squares.first), root(squares.second)};
    return norms;
}

INNER double* rates_of(const Layers& given) { return given.sums + 2 * given.end[given.count - 1]; }

__global__ void lars_rates(const GRID_CONSTANT Layers given) {
    if (threadIdx.x) return;
    const int number = (int)blockIdx.x;
    const double eta = given.numbers[3], epsilon = given.numbers[4], scale = given.numbers[5];
    const Two norms = norms_of(given, number);
    const double weight = norms.first, gradient = norms.second * scale;
    double trust = given.one[number];
    if (trust < 0)
        trust = weight == 0 || gradient == 0 ? 1 : eta * weight / (gradient + given.wd[number] * weight + epsilon);
    rates_of(given)[number] = given.rate[number] * trust;
}

__global__ void lamb_rates(const GRID_CONSTANT Layers given) {
    if (threadIdx.x) return;
    const int number = (int)blockIdx.x;
    const double lowest = given.numbers[6], highest = given.numbers[7];
    const Two norms = norms_of(given, number);
    double weight = norms.first;
    if (lowest > weight) weight = lowest;
    if (highest < weight) weight = highest;
    const double trust = weight == 0 || norms.second == 0 ? 1 : weight / norms.second;
    rates_of(given)[number] = given.rate[number] * trust;
}

// Have `change(i)` made of the elements of this block's part of a cell.
template <class Change> INNER void walk(const Layers& given, int number, const Change& change) {
    const long long parts = CELL / DESCENT_PART, part = blockIdx.x - first_cell(given, number) * parts;
    const long long low = part * DESCENT_PART, end = low + DESCENT_PART;
    const long long high = end < given.size[number] ? end : given.size[number];
#pragma unroll 1
    for (long long i = low + threadIdx.x; i < high; i += blockDim.x) change(i);
}

INNER int layer_of_block(const Layers& given) {
    return range_of(given.end, given.count, blockIdx.x / (CELL / DESCENT_PART));
}

template <class Kind> __global__ void lars_descent(const GRID_CONSTANT Layers given) {
    typedef typename Kind::computed T;
    const int number = layer_of_block(given);
    const Layer<Kind> layer(given, number);
    const T rate = rates_of(given)[number], momentum = given.numbers[2];
    walk(given, number, [&](long long i) {
        const T weight = layer.weight(i);
        const T change = decayed(layer.gradient(i), weight, layer.wd, layer.decays) * rate;
        if (layer.first) {
            const T velocity = layer.first[i] * momentum - change;
            layer.first[i] = velocity;
            layer.change(i, weight + velocity);
        } else {
            layer.change(i, weight - change);
        }
    });
}

template <class Kind> __global__ void lamb_descent(const GRID_CONSTANT Layers given) {
    typedef typename Kind::computed T;
    const int number = layer_of_block(given);
    const Layer<Kind> layer(given, number);
    const T rate = rates_of(given)[number];
    walk(given, number, [&](long long i) { layer.change(i, layer.weight(i) - layer.total[i] * rate); });
}

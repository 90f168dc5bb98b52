// Norms of many arrays, and whether all numbers in them are finite; and their scaling, in place.

enum { ARRAYS = 160, SCALED_PART = 1 << 12 };

// What one launch is given, by value: at most 4096 bytes. mpikv/compute/cuda/norms.py has the same.
struct Arrays {
    void* array[ARRAYS];
    long long size[ARRAYS];
    long long end[ARRAYS];  // the cells, or the parts to be scaled, of this array and those before it
    double* sums;           // two for each cell
    double factor;
    long long count;
};

INNER bool is_finite(float number) { return (bits_of(number) & 0x7F800000u) != 0x7F800000u; }
INNER bool is_finite(double number) { return (bits_of(number) & 0x7FF0000000000000ull) != 0x7FF0000000000000ull; }

// Of each cell the sum of the squares of its numbers, as they are when rounded to another kind, and how many of these
// are not finite.
template <class From, class To> __global__ void measure(const GRID_CONSTANT Arrays given) {
    SHARED Board board;
    const int number = range_of(given.end, given.count, blockIdx.x);
    const long long begin = (blockIdx.x - (number ? given.end[number - 1] : 0)) * CELL;
    const typename From::stored* array = (const typename From::stored*)given.array[number] + begin;
    add_up(cell_size(begin, given.size[number]), board, [&](int i) {
        const typename To::computed found = To::widen(To::narrow(From::widen(array[i])));
        const double wide = (double)found;
        const Two two = {wide * wide, is_finite(found) ? 0.0 : 1.0};
        return two;
    });
    all_threads([&](unsigned int thread) {
        if (thread) return;
        given.sums[2 * (long long)blockIdx.x] = board.leaf[0].first;
        given.sums[2 * (long long)blockIdx.x + 1] = board.leaf[0].second;
    });
}

// Multiplied in float64, and rounded once.
template <class Kind> __global__ void scale(const GRID_CONSTANT Arrays given) {
    const int number = range_of(given.end, given.count, blockIdx.x);
    typename Kind::stored* array = (typename Kind::stored*)given.array[number];
    const long long low = (blockIdx.x - (number ? given.end[number - 1] : 0)) * SCALED_PART;
    const long long high = low + SCALED_PART < given.size[number] ? low + SCALED_PART : given.size[number];
    for (long long i = low + threadIdx.x; i < high; i += blockDim.x)
        array[i] = Kind::narrow((double)Kind::widen(array[i]) * given.factor);
}

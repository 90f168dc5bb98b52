// Norms of many arrays, and whether all numbers in them are finite; and their scaling, in place.

enum { ARRAYS = 160, SCALED_PART = 1 << 12 };

// What one launch is given, by value: at most 4096 bytes. loading.py reads its fields here.
struct Arrays {
    void* array[ARRAYS];
    long long size[ARRAYS];
    long long end[ARRAYS];  // the cells, or the parts to be scaled, of this array and those before it
    double* sums;           // two for each piece of a cell
    double factor;
    long long count;
};

INNER bool is_finite(float number) { return (bits_of(number) & 0x7F800000u) != 0x7F800000u; }
INNER bool is_finite(double number) { return (bits_of(number) & 0x7FF0000000000000ull) != 0x7FF0000000000000ull; }

// Of each piece of a cell the sum of the squares of its numbers, as they are when rounded to another kind, and how many of
// these are not finite.
template <class From, class To> __global__ void measure(const GRID_CONSTANT Arrays given) {
    const long long cell = blockIdx.x / PIECES;
    const int number = range_of(given.end, given.count, cell);
    const long long begin = (cell - (number ? given.end[number - 1] : 0)) * CELL;
    const typename From::stored* array = (const typename From::stored*)given.array[number] + begin;
    const bool aligned = is_aligned(array);
    const auto visit = [&](int i, int count, Two* found) {
        const Group<typename From::stored> group = read(array, group_of(i, count, aligned));
        for (int k = 0; k < GROUP; k++) {
            const typename To::computed rounded = To::widen(To::narrow(From::widen(group.number[k])));
            const double wide = (double)rounded;
            const Two two = {wide * wide, is_finite(rounded) ? 0.0 : 1.0};
            found[k] = two;
        }
    };
    add_up_piece(cell_size(begin, given.size[number]), given.sums, [&](const Node& piece, int depth, Two* leaf) {
        add_up_leaves(piece, depth, leaf, visit);
    });
}

// Multiplied in float64, and rounded once.
template <class Kind> __global__ void scale(const GRID_CONSTANT Arrays given) {
    const int number = range_of(given.end, given.count, blockIdx.x);
    const long long low = (blockIdx.x - (number ? given.end[number - 1] : 0)) * SCALED_PART;
    const long long left = given.size[number] - low;
    typename Kind::stored* array = (typename Kind::stored*)given.array[number] + low;
    each_group(left < SCALED_PART ? (int)left : (int)SCALED_PART, is_aligned(array), [&](const Places& places) {
        Group<typename Kind::stored> group = read(array, places);
        for (int k = 0; k < GROUP; k++)
            group.number[k] = Kind::narrow((double)Kind::widen(group.number[k]) * given.factor);
        write(group, array, places);
    });
}

// Norms of many arrays, and whether all numbers in them are finite; and their scaling, in place.

enum { SCALED_PART = 1 << 12 };

INNER bool is_finite(float number) { return (bits_of(number) & 0x7F800000u) != 0x7F800000u; }
INNER bool is_finite(double number) { return (bits_of(number) & 0x7FF0000000000000ull) != 0x7FF0000000000000ull; }

// Of each piece of a cell the sum of the squares of its numbers, as they are when rounded to another kind, and how many of
// these are not finite. Sizes are of elements. The target has two sums for each piece of the array's cells.
template <class From, class To> __global__ void measure(const GRID_CONSTANT Pairs pairs) {
    const Part part = part_of_pairs(pairs, CELL, blockIdx.x / PIECES);
    const typename From::stored* array = (const typename From::stored*)part.source + part.low;
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
    double* sums = (double*)part.target + 2 * PIECES * (part.low / CELL);
    add_up_piece((int)(part.high - part.low), sums + 2 * (blockIdx.x % PIECES), [&](const Node& piece, int depth, Two* leaf) {
        add_up_leaves(piece, depth, leaf, visit);
    });
}

// Multiplied in float64, and rounded once. Sizes are of elements.
template <class Kind> __global__ void scale(const GRID_CONSTANT Pairs pairs) {
    const Part part = part_of_pairs(pairs, SCALED_PART, blockIdx.x);
    typename Kind::stored* array = (typename Kind::stored*)part.target + part.low;
    each_group((int)(part.high - part.low), is_aligned(array), [&](const Places& places) {
        Group<typename Kind::stored> group = read(array, places);
        for (int k = 0; k < GROUP; k++)
            group.number[k] = Kind::narrow((double)Kind::widen(group.number[k]) * pairs.number);
        write(group, array, places);
    });
}

// Many arrays copied, cast, or looked at, by one launch.

enum { PART = 1 << 15, CAST_PART = 1 << 12 };

template <class Unit> INNER long long copied(const char* source, char* target, long long low, long long high) {
    const int units = (int)((high - low) / (long long)sizeof(Unit));
    const Unit* from = (const Unit*)(source + low);
    Unit* to = (Unit*)(target + low);
    each_group(units, false, [&](const Places& places) { write(read(from, places), to, places); });
    return low + units * (long long)sizeof(Unit);
}

// Sizes are of bytes. The widest units are moved of which both arrays begin at a multiple, and the rest byte by byte.
__global__ void copy_bytes(const GRID_CONSTANT Pairs pairs) {
    const Part part = part_of_pairs(pairs, PART, blockIdx.x);
    const char* source = part.source;
    char* target = part.target;
    const word64 both = (word64)source | (word64)target;
    long long low = part.low;
    if (both % 16 == 0)
        low = copied<uint4>(source, target, low, part.high);
    else if (both % 8 == 0)
        low = copied<word64>(source, target, low, part.high);
    else if (both % 4 == 0)
        low = copied<word32>(source, target, low, part.high);
    else if (both % 2 == 0)
        low = copied<unsigned short>(source, target, low, part.high);
    copied<unsigned char>(source, target, low, part.high);
}

// Sizes are of elements.
template <class From, class To> __global__ void cast(const GRID_CONSTANT Pairs pairs) {
    const Part part = part_of_pairs(pairs, CAST_PART, blockIdx.x);
    const typename From::stored* source = (const typename From::stored*)part.source + part.low;
    typename To::stored* target = (typename To::stored*)part.target + part.low;
    each_group((int)(part.high - part.low), is_aligned(source) && is_aligned(target), [&](const Places& places) {
        const Group<typename From::stored> from = read(source, places);
        Group<typename To::stored> to;
        for (int k = 0; k < GROUP; k++) to.number[k] = To::narrow(From::widen(from.number[k]));
        write(to, target, places);
    });
}

// Sizes are of elements. The target of an array is a byte, which becomes 1 if an element is no number, or larger in size
// than the bound; whoever writes it writes the same.
template <class Kind> __global__ void exceeding(const GRID_CONSTANT Pairs pairs) {
    const Part part = part_of_pairs(pairs, CAST_PART, blockIdx.x);
    const typename Kind::stored* source = (const typename Kind::stored*)part.source + part.low;
    const typename Kind::computed bound = (typename Kind::computed)pairs.number;
    bool exceeds = false;
    each_group((int)(part.high - part.low), is_aligned(source), [&](const Places& places) {
        const Group<typename Kind::stored> group = read(source, places);
        for (int k = 0; k < GROUP; k++) exceeds = exceeds || !(magnitude_of(Kind::widen(group.number[k])) <= bound);
    });
    if (exceeds) *part.target = 1;
}

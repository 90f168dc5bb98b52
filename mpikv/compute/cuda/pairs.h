// Pairs of arrays, as of the source and the target of a copy, for one launch.
//
// Every pair is cut into parts of one size, the last shorter, and each block has a part, or some blocks have one
// together: large and small arrays keep a GPU as busy as one array of all their elements would.

enum { PAIRS = 127 };

// What one launch is given, by value: at most 4096 bytes. loading.py reads its fields here.
struct Pairs {
    const char* source[PAIRS];
    char* target[PAIRS];
    long long size[PAIRS];  // of bytes, or of elements
    long long end[PAIRS];   // the parts of this pair and those before it
    long long count;
    double number;  // a bound, or a factor
};

struct Part {
    const char* source;  // where the pair begins
    char* target;
    long long low, high;
};

// Return a part of so many elements, or bytes, by its number among those of all pairs.
INNER Part part_of_pairs(const Pairs& pairs, long long length, long long number) {
    const int pair = range_of(pairs.end, pairs.count, number);
    const long long low = (number - (pair ? pairs.end[pair - 1] : 0)) * length;
    const long long high = low + length < pairs.size[pair] ? low + length : pairs.size[pair];
    const Part part = {pairs.source[pair], pairs.target[pair], low, high};
    return part;
}

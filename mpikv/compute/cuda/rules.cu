// Updates by an optimizer's rule, element by element.

enum { PART = 1 << 12, THREADS = 256 };

// How many ranges of elements a launch updates, and by how many different rows of numbers.
struct one { enum { ranges = 1, rows = 1 }; };
struct many { enum { ranges = 200, rows = 16 }; };

// What one launch is given, by value: at most 4096 bytes. loading.py reads its fields here.
template <class Kind, class Count> struct Update {
    typename Kind::computed* total;
    typename Kind::stored* value;
    typename Kind::computed* master;  // null where the value is all there is
    typename Kind::computed* state[STATES];
    const double* table;  // rows in memory, which are read when it runs; null: those below
    long long begin;      // where the first range begins, in elements; the others follow one another
    long long count;
    long long end[Count::ranges];
    int row[Count::ranges];
    double numbers[Count::rows * NUMBERS];  // rows of the answers about a step, as bits, and of the rule's numbers
};

// How many blocks a multiprocessor has room for, which limits the registers of a thread: so many that nothing has to be
// kept in memory instead.
template <class Kind> struct Resident {
    enum { blocks = sizeof(typename Kind::stored) == 8 ? 2 : sizeof(typename Kind::stored) == 4 ? 4 : 3 };
};

// A block updates a part, and in it the ranges that reach into it.
template <template <class> class Rule, class Kind, class Count> __global__ void LAUNCH_BOUNDS(THREADS, Resident<Kind>::blocks)
update(const GRID_CONSTANT Update<Kind, Count> given) {
    const double* rows = given.table ? given.table : given.numbers;
    const long long end = given.end[given.count - 1], part = given.begin + (long long)blockIdx.x * PART;
    const long long last = part + PART < end ? part + PART : end;
    int range = range_of(given.end, given.count, part);
    for (long long low = part; low < last; range++) {
        const long long high = given.end[range] < last ? given.end[range] : last;
        const Elements<Rule, Kind> all(given.total, given.value, given.master, [&](int s) { return given.state[s]; }, low,
                                       rows + (long long)given.row[range] * NUMBERS);
        walk(all, (int)(high - low));
        low = high;
    }
}

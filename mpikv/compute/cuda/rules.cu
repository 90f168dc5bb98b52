// Updates by an optimizer's rule. The rule stands before this text: mpikv/compute/cuda/kernels.py prints it from its record.
//
// Every operation is that of the rule in numpy, in the same order and in the same dtype. Numbers are rounded to it
// first, as numpy does. So the bits are the same as well, as long as the compiler fuses nothing.

enum { NUMBERS = 12, STATES = 8, PART = 1 << 12, THREADS = 256 };

// How many ranges of elements a launch updates, and by how many different rows of numbers.
struct one { enum { ranges = 1, rows = 1 }; };
struct many { enum { ranges = 200, rows = 16 }; };

// What one launch is given, by value: at most 4096 bytes. mpikv/compute/cuda/kernels.py has the same.
template <class Kind, class Count> struct Update {
    const typename Kind::computed* total;
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

// --- The walk

// Update so many elements, which have one row of numbers.
template <template <class> class Rule, class Kind, class Count>
INNER void walk(const Update<Kind, Count>& given, const double* numbers, long long low, int count) {
    typedef typename Kind::computed T;
    const int bits = (int)numbers[0];
    T n[NUMBERS - 1];
    for (int k = 0; k < NUMBERS - 1; k++) n[k] = (T)numbers[1 + k];
    const T* total = given.total + low;
    typename Kind::stored* value = given.value + low;
    T* master = given.master ? given.master + low : 0;
    T* kept[STATES];
    bool aligned = is_aligned(total) && is_aligned(value) && is_aligned(master);
    for (int s = 0; s < Rule<T>::states; s++) {
        kept[s] = given.state[s] + low;
        aligned = aligned && is_aligned(kept[s]);
    }
    each_group(count, aligned, [&](const Places& places) {
        const Group<T> gradient = read(total, places);
        Group<typename Kind::stored> stored;
        Group<T> weight, state[STATES];
        if (master) {
            weight = read(master, places);
        } else {
            stored = read(value, places);
            for (int k = 0; k < GROUP; k++) weight.number[k] = Kind::widen(stored.number[k]);
        }
        for (int s = 0; s < Rule<T>::states; s++) state[s] = read(kept[s], places);
        for (int k = 0; k < GROUP; k++) {
            T mine[STATES];
            for (int s = 0; s < Rule<T>::states; s++) mine[s] = state[s].number[k];
            weight.number[k] = Rule<T>::update(weight.number[k], gradient.number[k], mine, bits, n);
            for (int s = 0; s < Rule<T>::states; s++) state[s].number[k] = mine[s];
            stored.number[k] = Kind::narrow(weight.number[k]);
        }
        for (int s = 0; s < Rule<T>::states; s++) write(state[s], kept[s], places);
        if (master) write(weight, master, places);
        write(stored, value, places);
    });
}

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
        walk<Rule>(given, rows + (long long)given.row[range] * NUMBERS, low, (int)(high - low));
        low = high;
    }
}

// The elements of a value, and of all else that an optimizer's rule changes. mpikv/compute/cuda/loading.py
// prints the rule from its record.
//
// Every operation is that of the rule in numpy, in the same order and in the same dtype. Numbers are rounded to it
// first, as numpy does. So the bits are the same as well, as long as the compiler fuses nothing.

enum { NUMBERS = 12, STATES = 8 };

// Arrays from an element on, and a row of the answers about a step, as bits, and of the rule's numbers.
template <template <class> class Rule, class Kind> struct Elements {
    typedef typename Kind::computed T;
    typedef typename Kind::stored Stored;
    T* total;
    Stored* value;
    T* master;  // null where the value is all there is
    T* state[STATES];
    int bits;
    T n[NUMBERS - 1];
    bool aligned;

    // `states(s)` is the array of a state from its first element on.
    template <class States>
    INNER Elements(void* totals, void* values, void* masters, const States& states, long long low, const double* row)
        : total((T*)totals + low), value((Stored*)values + low), master(masters ? (T*)masters + low : 0),
          bits((int)row[0]), aligned(is_aligned(total) && is_aligned(value) && is_aligned(master)) {
        for (int s = 0; s < Rule<T>::states; s++) {
            state[s] = (T*)states(s) + low;
            aligned = aligned && is_aligned(state[s]);
        }
        for (int k = 0; k < NUMBERS - 1; k++) n[k] = (T)row[1 + k];
    }
};

// Some elements while a thread has them.
template <template <class> class Rule, class Kind> struct Taken {
    typedef typename Kind::computed T;
    typedef typename Kind::stored Stored;
    Group<T> weight, gradient, state[STATES];

    INNER Taken(const Elements<Rule, Kind>& all, const Places& places) : gradient(read(all.total, places)) {
        if (all.master) {
            weight = read(all.master, places);
        } else {
            const Group<Stored> stored = read(all.value, places);
            for (int k = 0; k < GROUP; k++) weight.number[k] = Kind::widen(stored.number[k]);
        }
        for (int s = 0; s < Rule<T>::states; s++) state[s] = read(all.state[s], places);
    }
    INNER void update(const Elements<Rule, Kind>& all) {
        for (int k = 0; k < GROUP; k++) {
            T mine[STATES];
            for (int s = 0; s < Rule<T>::states; s++) mine[s] = state[s].number[k];
            Rule<T>::update(weight.number[k], gradient.number[k], mine, all.bits, all.n);
            for (int s = 0; s < Rule<T>::states; s++) state[s].number[k] = mine[s];
        }
    }
    INNER void keep_states(const Elements<Rule, Kind>& all, const Places& places) const {
        for (int s = 0; s < Rule<T>::states; s++) write(state[s], all.state[s], places);
    }
    INNER void keep_weight(const Elements<Rule, Kind>& all, const Places& places) const {
        if (all.master) write(weight, all.master, places);
        Group<Stored> stored;
        for (int k = 0; k < GROUP; k++) stored.number[k] = Kind::narrow(weight.number[k]);
        write(stored, all.value, places);
    }
};

// Update so many elements.
template <template <class> class Rule, class Kind> INNER void walk(const Elements<Rule, Kind>& all, int count) {
    each_group(count, all.aligned, [&](const Places& places) {
        Taken<Rule, Kind> taken(all, places);
        taken.update(all);
        taken.keep_states(all, places);
        taken.keep_weight(all, places);
    });
}

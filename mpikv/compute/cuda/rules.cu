// The forms of the optimizers' rules (mpikv/optimizers/forms.py), one body each, `name_rule` for the form's name.
//
// Every operation is that of the rule in numpy, in the same order and in the same dtype. Numbers are rounded to it
// first, as numpy does. So the bits are the same as well, as long as the compiler fuses nothing.

enum { COMMON = 3, NUMBERS = 12, STATES = 3, PART = 1 << 12, THREADS = 256 };

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
    double numbers[Count::rows * NUMBERS];  // rows of scale, bound, wd, and the numbers of the form
};

// --- Parts

template <class T> INNER T larger(T left, T right) {  // which keeps NaN; of two zeros it is the right one
    return left <= right || right != right ? right : left;
}

template <class T> INNER T sign_of(T number) {  // which keeps NaN and makes zero positive
    return number > 0 ? (T)1 : number < 0 ? (T)-1 : number == 0 ? (T)0 : number;
}

// --- Rules
//
// `rule(weight, gradient, state)` returns the new weight and puts the new state in its place.

template <class T> struct Coupled {
    static const bool coupled = true;  // wd * weight is part of the gradient
};

template <class T> struct Decoupled {
    static const bool coupled = false;
};

template <class T> struct descent_rule : Coupled<T> {
    static const int states = 0;
    T rate;
    INNER descent_rule(const double* n) : rate(n[3]) {}
    INNER T operator()(T weight, T gradient, T*) const { return weight - gradient * rate; }
};

template <class T> struct momentum_rule : Coupled<T> {
    static const int states = 1;
    T rate, momentum;
    INNER momentum_rule(const double* n) : rate(n[3]), momentum(n[4]) {}
    INNER T operator()(T weight, T gradient, T* state) const {
        state[0] = state[0] * momentum - gradient * rate;
        return weight + state[0];
    }
};

template <class T> struct nesterov_rule : Coupled<T> {
    static const int states = 1;
    T rate, momentum;
    INNER nesterov_rule(const double* n) : rate(n[3]), momentum(n[4]) {}
    INNER T operator()(T weight, T gradient, T* state) const {
        const T change = gradient * rate;
        state[0] = state[0] * momentum - change;
        return weight + (state[0] * momentum - change);
    }
};

template <class T> struct sign_rule : Coupled<T> {
    static const int states = 0;
    T rate, decay;
    bool decays;
    INNER sign_rule(const double* n) : rate(n[3]), decay(n[4]), decays(n[4] != 0) {}
    INNER T operator()(T weight, T gradient, T*) const {
        return weight - decayed(sign_of(gradient), weight, decay, decays) * rate;
    }
};

template <class T> struct signum_rule : Coupled<T> {
    static const int states = 1;
    T rate, decay, kept, taken;
    bool decays;
    INNER signum_rule(const double* n) : rate(n[3]), decay(n[4]), kept(n[5]), taken(n[6]), decays(n[4] != 0) {}
    INNER T operator()(T weight, T gradient, T* state) const {
        state[0] = averaged(state[0], gradient, kept, taken);
        return weight - decayed(sign_of(state[0]), weight, decay, decays) * rate;
    }
};

template <class T> struct adagrad_rule : Coupled<T> {
    static const int states = 1;
    T rate, epsilon;
    INNER adagrad_rule(const double* n) : rate(n[3]), epsilon(n[4]) {}
    INNER T operator()(T weight, T gradient, T* state) const {
        state[0] = state[0] + gradient * gradient;
        return weight - gradient / (root(state[0]) + epsilon) * rate;
    }
};

template <class T> struct rmsprop_rule : Coupled<T> {
    static const int states = 1;
    T rate, epsilon, largest, kept, taken;
    INNER rmsprop_rule(const double* n) : rate(n[3]), epsilon(n[4]), largest(n[5]), kept(n[6]), taken(n[7]) {}
    INNER T operator()(T weight, T gradient, T* state) const {
        state[0] = averaged(state[0], gradient * gradient, kept, taken);
        return clipped(weight - gradient / (root(state[0]) + epsilon) * rate, largest);
    }
};

template <class T> struct rmsprop_centered_rule : Coupled<T> {
    static const int states = 3;
    T rate, epsilon, largest, kept, taken, momentum;
    INNER rmsprop_centered_rule(const double* n)
        : rate(n[3]), epsilon(n[4]), largest(n[5]), kept(n[6]), taken(n[7]), momentum(n[8]) {}
    INNER T operator()(T weight, T gradient, T* state) const {
        const T mean = averaged(state[0], gradient, kept, taken);
        const T squares = averaged(state[1], gradient * gradient, kept, taken);
        const T deviation = root(larger(squares - mean * mean, (T)0) + epsilon);
        state[0] = mean;
        state[1] = squares;
        state[2] = state[2] * momentum - gradient / deviation * rate;
        return clipped(weight + state[2], largest);
    }
};

template <class T> struct adadelta_rule : Coupled<T> {
    static const int states = 2;
    T rate, epsilon, kept, taken;
    INNER adadelta_rule(const double* n) : rate(n[3]), epsilon(n[4]), kept(n[5]), taken(n[6]) {}
    INNER T operator()(T weight, T gradient, T* state) const {
        state[0] = averaged(state[0], gradient * gradient, kept, taken);
        const T delta = gradient / root(state[0] + epsilon) * root(state[1] + epsilon);
        state[1] = averaged(state[1], delta * delta, kept, taken);
        return weight - delta * rate;
    }
};

// What Adam and those after it keep: averages of the gradient and of its squares.
template <class T> struct Averages {
    T rate, epsilon, kept, taken, kept_squares, taken_squares;
    INNER Averages(const double* n)
        : rate(n[3]), epsilon(n[4]), kept(n[5]), taken(n[6]), kept_squares(n[7]), taken_squares(n[8]) {}
    INNER void average(T gradient, T* state) const {
        state[0] = averaged(state[0], gradient, kept, taken);
        state[1] = averaged(state[1], gradient * gradient, kept_squares, taken_squares);
    }
};

template <class T> struct adam_rule : Coupled<T>, Averages<T> {
    static const int states = 2;
    INNER adam_rule(const double* n) : Averages<T>(n) {}
    INNER T operator()(T weight, T gradient, T* state) const {
        this->average(gradient, state);
        return weight - state[0] / (root(state[1]) + this->epsilon) * this->rate;
    }
};

template <class T> struct adamw_rule : Decoupled<T>, Averages<T> {
    static const int states = 2;
    T decay;
    bool decays;
    INNER adamw_rule(const double* n) : Averages<T>(n), decay(n[9]), decays(n[2] != 0) {}
    INNER T operator()(T weight, T gradient, T* state) const {
        this->average(gradient, state);
        const T change = state[0] / (root(state[1]) + this->epsilon) * this->rate;
        return weight - decayed(change, weight, decay, decays);
    }
};

template <class T> struct nadam_rule : Coupled<T>, Averages<T> {
    static const int states = 2;
    T of_gradient, of_mean;
    INNER nadam_rule(const double* n) : Averages<T>(n), of_gradient(n[9]), of_mean(n[10]) {}
    INNER T operator()(T weight, T gradient, T* state) const {
        this->average(gradient, state);
        const T direction = gradient * of_gradient + state[0] * of_mean;
        return weight - direction / (root(state[1]) + this->epsilon) * this->rate;
    }
};

template <class T> struct adamax_rule : Coupled<T> {
    static const int states = 2;
    T rate, epsilon, kept, taken, kept_largest;
    INNER adamax_rule(const double* n) : rate(n[3]), epsilon(n[4]), kept(n[5]), taken(n[6]), kept_largest(n[7]) {}
    INNER T operator()(T weight, T gradient, T* state) const {
        state[0] = averaged(state[0], gradient, kept, taken);
        state[1] = larger(state[1] * kept_largest, magnitude_of(gradient) + epsilon);
        return weight - state[0] / state[1] * rate;
    }
};

template <class T> struct ftrl_rule : Decoupled<T> {
    static const int states = 2;
    T wd, rate, lamda1, beta;
    bool moves;
    INNER ftrl_rule(const double* n) : wd(n[2]), rate(n[3]), lamda1(n[4]), beta(n[5]), moves(n[3] != 0) {}
    INNER T operator()(T weight, T gradient, T* state) const {
        if (!moves) return weight;
        const T before = root(state[1]);
        state[1] = state[1] + gradient * gradient;
        const T after = root(state[1]);
        state[0] = state[0] + (gradient - (after - before) / rate * weight);
        return (clipped(state[0], lamda1) - state[0]) / ((after + beta) / rate + wd);
    }
};

// --- The walk

// Update so many elements, which have one row of numbers.
template <template <class> class Rule, class Kind, class Count>
INNER void walk(const Update<Kind, Count>& given, const double* numbers, long long low, int count) {
    typedef typename Kind::computed T;
    const Rule<T> rule(numbers);
    const T scale = (T)numbers[0], bound = (T)numbers[1], wd = (T)numbers[2];
    const bool decays = Rule<T>::coupled && numbers[2] != 0;
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
            const T descent = decayed(clipped(gradient.number[k] * scale, bound), weight.number[k], wd, decays);
            weight.number[k] = rule(weight.number[k], descent, mine);
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

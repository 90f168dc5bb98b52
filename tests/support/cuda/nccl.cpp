// NCCL between processes of one machine, over shared memory: what CuPy calls of it.
//
// A rank runs one operation at a time, as a GPU may that has no room for two. So operations of two communicators that
// ranks start in different orders wait for each other forever: that is told, and the process ends.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "device.h"

using namespace emulated;

namespace {

constexpr int SEATS = 8;
constexpr size_t CHUNK = 1 << 20, LETTER = 1 << 20;

enum Kind { ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, SEND, RECEIVE };
const char* const NAMES[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclReduceScatter", "ncclAllGather", "ncclSend", "ncclRecv"};

// What all ranks must call alike.
struct Signature {
    int kind;
    size_t count;
    int type, operation, root;
    bool operator==(const Signature& other) const {
        return kind == other.kind && count == other.count && type == other.type && operation == other.operation && root == other.root;
    }
};

struct Seat {
    std::atomic<int> process, wanted;
    std::atomic<uint64_t> met;        // how often this rank has come to a meeting
    std::atomic<uint64_t> elsewhere;  // the communicator of which this rank's process runs an operation
    Signature calls;
    char chunk[CHUNK];
};

struct Letter {
    std::atomic<size_t> size;  // 0: it is empty
    size_t all;
    char bytes[LETTER];
};

struct Board {
    std::atomic<int> joined;
    Seat seats[SEATS];
    Letter letters[SEATS][SEATS];  // from, to
};

}  // namespace

struct ncclComm {
    Board* board;
    uint64_t id;
    int rank, size, device;
    std::atomic<bool> aborted{false};
    std::atomic<int> error{ncclSuccess};
    std::deque<End> pending{};
};

namespace {

struct Call {
    Signature what;
    const char* source;
    char* target;
    int peer;
    ncclComm* comm;
    Stream* stream;
    size_t done = 0;
};

thread_local std::vector<Call> group;
thread_local int depth = 0, bad = ncclSuccess;
thread_local std::string said;
std::mutex one_at_a_time, knowing;
std::vector<ncclComm*> known;  // for who holds the second mutex
std::map<int, End> last_of_device;

int failed(ncclResult_t result, const std::string& why) { return said = why, bad = result, result; }

size_t width(int type) {
    switch (type) {
        case ncclInt8: case ncclUint8: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
        default: return 4;
    }
}

struct Bfloat16 {
    uint16_t bits;
    operator float() const {
        uint32_t wide = (uint32_t)bits << 16;
        float value;
        return memcpy(&value, &wide, 4), value;
    }
    Bfloat16(float value) {
        uint32_t wide;
        memcpy(&wide, &value, 4);
        bits = value != value ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    }
};

template <class T> void fold(T* into, const T* from, size_t count, int operation) {
    for (size_t i = 0; i < count; i++) switch (operation) {
        case ncclProd: into[i] = T(into[i] * from[i]); break;
        case ncclMax: into[i] = from[i] > into[i] ? from[i] : into[i]; break;
        case ncclMin: into[i] = from[i] < into[i] ? from[i] : into[i]; break;
        default: into[i] = T(into[i] + from[i]);
    }
}

template <class T> void divide(T* into, size_t count, int by) {
    for (size_t i = 0; i < count; i++) into[i] = T(into[i] / T(by));
}

template <class Function> void typed(int type, Function use) {
    switch (type) {
        case ncclInt8: return use((int8_t*)0);
        case ncclUint8: return use((uint8_t*)0);
        case ncclInt32: return use((int32_t*)0);
        case ncclUint32: return use((uint32_t*)0);
        case ncclInt64: return use((int64_t*)0);
        case ncclUint64: return use((uint64_t*)0);
        case ncclFloat16: return use((_Float16*)0);
        case ncclBfloat16: return use((Bfloat16*)0);
        case ncclFloat64: return use((double*)0);
        default: return use((float*)0);
    }
}

[[noreturn]] void end(ncclComm* comm, const std::string& why) {
    fprintf(stderr, "emulated NCCL: rank %d of %d: %s\n", comm->rank, comm->size, why.c_str());
    abort();
}

// A process that nobody has asked for its status yet has ended too.
bool has_ended(int process) {
    char path[40], text[200] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE* file = fopen(path, "r");
    if (!file) return true;
    size_t size = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    return !size || strstr(text, ") Z ");
}

// Asks a rank to run what it has queued, waits a little, and looks whether it can come. Returns false where it need not.
template <class Needed> bool still(ncclComm* comm, int peer, unsigned& looks, const char* doing, Needed needed) {
    if (comm->aborted || comm->error) return false;
    Seat& other = comm->board->seats[peer];
    other.wanted = 1;
    usleep(looks < 64 ? 0 : 50);
    if (++looks % 1024 == 0 && has_ended(other.process)) comm->error = ncclRemoteError;
    uint64_t elsewhere = other.elsewhere;
    if (!elsewhere || elsewhere == comm->id) return true;
    std::lock_guard<std::mutex> guard(knowing);
    for (ncclComm* each : known) {
        if (each->id != elsewhere || each->aborted) continue;
        Seat* seats = each->board->seats;
        bool waits = false;
        for (int i = 0; i < each->size; i++) waits |= seats[i].process == other.process && seats[i].met > seats[each->rank].met;
        // It waits there for this rank, and this one here for it, unless it was here before.
        if (waits && needed())
            end(comm, std::string("deadlock: ") + doing + " waits for rank " + std::to_string(peer) + ", whose operation of another communicator waits for this rank");
    }
    return true;
}

// Returns false if the communicator was aborted meanwhile.
bool meet(ncclComm* comm, const char* doing) {
    Board* board = comm->board;
    uint64_t number = ++board->seats[comm->rank].met;
    unsigned looks = 0;
    for (int i = 0; i < comm->size; i++) {
        auto needed = [&] { return board->seats[i].met < number; };
        while (needed())
            if (!still(comm, i, looks, doing, needed)) return false;
    }
    return true;
}

std::string told(const Signature& call) {
    char text[160];
    snprintf(text, sizeof text, "%s of %zu elements (type %d, operation %d, root %d)", NAMES[call.kind], call.count, call.type, call.operation, call.root);
    return text;
}

// A collective, in chunks: each rank shows its own, all take what they need.
void run_collective(Call& call) {
    ncclComm* comm = call.comm;
    const Signature& what = call.what;
    const char* doing = NAMES[what.kind];
    Seat* seats = comm->board->seats;
    const int n = comm->size, rank = comm->rank;
    seats[rank].calls = what;
    if (!meet(comm, doing)) return;
    for (int i = 0; i < n; i++)
        if (!(seats[i].calls == what)) end(comm, "it calls " + told(what) + ", and rank " + std::to_string(i) + " " + told(seats[i].calls));
    if (!meet(comm, doing)) return;
    const size_t each = width(what.type), own = what.count * each;
    const bool sums = what.kind == ALL_REDUCE || what.kind == REDUCE || what.kind == REDUCE_SCATTER;
    // What a rank gives: of a scatter all ranks' parts. What it gets: of a gather all ranks' parts.
    const size_t given = what.kind == REDUCE_SCATTER ? own * n : own;
    const size_t step = sums ? CHUNK / each / n * n * each : CHUNK;
    for (size_t low = 0; low < given; low += step) {
        size_t size = std::min(step, given - low);
        if (what.kind != BROADCAST || rank == what.root) memcpy(seats[rank].chunk, call.source + low, size);
        if (!meet(comm, doing)) return;
        if (what.kind == BROADCAST) {
            memmove(call.target + low, seats[what.root].chunk, size);
        } else if (what.kind == ALL_GATHER) {
            for (int i = 0; i < n; i++) memmove(call.target + i * own + low, seats[i].chunk, size);
        } else if (what.kind != REDUCE || rank == what.root) {
            std::string sum(size, 0);
            // As a ring does, each part of a message begins its sum at another rank.
            size_t count = size / each, part = (count + n - 1) / n;
            typed(what.type, [&](auto* kind) {
                using T = std::remove_pointer_t<decltype(kind)>;
                T* into = (T*)sum.data();
                for (int p = 0; p < n; p++) {
                    size_t first = std::min(count, p * part), last = std::min(count, first + part);
                    memcpy(into + first, (T*)seats[(p + 1) % n].chunk + first, (last - first) * each);
                    for (int i = 2; i <= n; i++) fold(into + first, (const T*)seats[(p + i) % n].chunk + first, last - first, what.operation);
                }
                if (what.operation == ncclAvg) divide(into, count, n);
            });
            // Of a scatter this rank gets the bytes from its own part alone.
            size_t from = what.kind == REDUCE_SCATTER ? rank * own : 0, begin = std::max(low, from), stop = std::min(low + size, from + own);
            if (begin < stop) memmove(call.target + begin - from, &sum[begin - low], stop - begin);
        }
        if (!meet(comm, doing)) return;
    }
}

// Sends and receives of one group go on side by side.
void run_letters(std::vector<Call>& calls) {
    unsigned looks = 0;
    for (bool open = true; open;) {
        open = false;
        bool moved = false;
        for (size_t place = 0; place < calls.size(); place++) {
            Call& call = calls[place];
            ncclComm* comm = call.comm;
            const size_t all = call.what.count * width(call.what.type);
            bool sends = call.what.kind == SEND;
            Letter& letter = sends ? comm->board->letters[comm->rank][call.peer] : comm->board->letters[call.peer][comm->rank];
            // A message is sent when it has been received: whoever sends alone waits.
            bool ended = call.done == all && !(sends && letter.size);
            open |= !ended;
            if (call.done == all) {
                if (!ended) comm->board->seats[call.peer].wanted = 1;
                continue;
            }
            // Of several to one rank the first comes first.
            bool first = std::none_of(calls.begin(), calls.begin() + place, [&](Call& before) {
                return before.peer == call.peer && before.what.kind == call.what.kind && before.done < before.what.count * width(before.what.type);
            });
            if (!first) continue;
            if (sends == (letter.size != 0)) {
                comm->board->seats[call.peer].wanted = 1;
                continue;
            }
            moved = true;
            size_t size = sends ? std::min(LETTER, all - call.done) : letter.size.load();
            if (sends) {
                memcpy(letter.bytes, call.source + call.done, size);
                letter.all = all;
            } else {
                if (letter.all != all) end(comm, "it receives " + std::to_string(all) + " bytes, and rank " + std::to_string(call.peer) + " sends " + std::to_string(letter.all));
                memcpy(call.target + call.done, letter.bytes, size);
            }
            letter.size = sends ? size : 0;
            call.done += size;
        }
        if (open && !moved && !still(calls[0].comm, calls[0].peer, looks, NAMES[calls[0].what.kind], [] { return false; })) return;
    }
}

// Lets all ranks know of which communicator this process runs an operation.
void stay(uint64_t id) {
    std::lock_guard<std::mutex> guard(knowing);
    for (ncclComm* each : known) each->board->seats[each->rank].elsewhere = id;
}

void run(std::vector<Call> calls) {
    std::lock_guard<std::mutex> alone(one_at_a_time);
    ncclComm* comm = calls[0].comm;
    planned("ncclKernel", &comm->aborted);
    stay(comm->id);
    std::vector<Call> letters;
    for (Call& call : calls) {
        if (call.what.kind >= SEND) letters.push_back(call);
        else if (!comm->aborted && !comm->error) run_collective(call);
    }
    if (!letters.empty()) run_letters(letters);
    stay(0);
}

ncclResult_t launch() {
    std::vector<Call> calls = std::move(group);
    group.clear();
    if (bad) return (ncclResult_t)std::exchange(bad, ncclSuccess);
    static const char* given = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    Lock lock(device().mutex);
    while (!calls.empty()) {
        ncclComm* comm = calls[0].comm;
        Stream* stream = calls[0].stream;
        auto rest = std::stable_partition(calls.begin(), calls.end(), [=](Call& call) { return call.comm == comm && call.stream == stream; });
        std::vector<Call> part(calls.begin(), rest), left(rest, calls.end());
        std::vector<End> after;
        End& last = last_of_device[comm->device];
        if (given && *given == '1' && last) after.push_back(last);
        device().put(lock, stream, [part] { run(part); }, after, [comm](const End& end) {
            comm->pending.push_back(end);
            last_of_device[comm->device] = end;
        });
        calls = left;
    }
    return ncclSuccess;
}

ncclResult_t call(int kind, const void* source, void* target, size_t count, int type, int operation, int root, int peer, ncclComm* comm, cudaStream_t handle) {
    Stream* stream = stream_of(handle);
    const bool aborted = comm && comm->aborted;  // a call that was held returns as if all were well
    const int status = planned(NAMES[kind]);
    if (!comm) return ncclInvalidArgument;
    if (status) failed((ncclResult_t)status, "as planned");
    else if (aborted) failed(ncclInvalidUsage, "the communicator was aborted");
    else if (root < 0 || root >= comm->size || peer < 0 || peer >= comm->size) failed(ncclInvalidArgument, "no such rank");
    else if (stream->gone || stream->device != comm->device) failed(ncclInvalidUsage, "the stream is of another GPU or was destroyed");
    size_t bytes = count * width(type), n = comm->size;
    bool reads = kind != RECEIVE && (kind != BROADCAST || comm->rank == root), writes = kind != SEND && (kind != REDUCE || comm->rank == root);
    if (!bad && count) {
        if (reads && !is_memory(source, kind == REDUCE_SCATTER ? bytes * n : bytes)) failed(ncclInvalidArgument, "the source is no memory of a GPU");
        if (writes && !is_memory(target, kind == ALL_GATHER ? bytes * n : bytes)) failed(ncclInvalidArgument, "the target is no memory of a GPU");
    }
    if (bad) return (ncclResult_t)(depth ? bad : std::exchange(bad, ncclSuccess));
    if (count) group.push_back({{kind, count, type, operation, root}, (const char*)source, (char*)target, peer, comm, stream});
    return depth ? ncclSuccess : launch();
}

ncclComm* join(const char* name, uint64_t id, int size, int rank, int device_number) {
    int file = shm_open(name, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Board))) return nullptr;
    void* there = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (there == MAP_FAILED) return nullptr;
    auto* comm = new ncclComm{(Board*)there, id, rank, size, device_number};
    comm->board->seats[rank].process = getpid();
    ++comm->board->joined;
    while (comm->board->joined < size) usleep(100);
    shm_unlink(name);
    Lock lock(device().mutex);
    std::lock_guard<std::mutex> guard(knowing);
    known.push_back(comm);
    device().peers.push_back([comm]() -> End {
        while (!comm->pending.empty() && comm->pending.front()->done) comm->pending.pop_front();
        if (comm->aborted || comm->pending.empty() || !comm->board->seats[comm->rank].wanted.exchange(0)) return nullptr;
        return comm->pending.front();
    });
    return comm;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t result) {
    static const char* const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "in progress"};
    return result < 8 ? texts[result] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) { return said.c_str(); }
ncclResult_t ncclGetUniqueId(ncclUniqueId* made) {
    memset(made, 0, sizeof *made);
    FILE* file = fopen("/dev/urandom", "r");
    bool read = file && fread(made->internal, 8, 1, file) == 1;
    if (file) fclose(file);
    return read ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId identity, int rank, ncclConfig_t*) {
    if (size < 1 || size > SEATS || rank < 0 || rank >= size) return (ncclResult_t)failed(ncclInvalidArgument, "no such rank");
    uint64_t id;
    memcpy(&id, identity.internal, 8);
    char name[40];
    snprintf(name, sizeof name, "/emulated-nccl-%016llx", (unsigned long long)id);
    int number = 0;
    cudaGetDevice(&number);
    *made = join(name, id, size, rank, number);
    if (int status = planned("ncclCommInitRank")) return *made = nullptr, (ncclResult_t)status;
    return *made ? ncclSuccess : (ncclResult_t)failed(ncclSystemError, "shared memory cannot be had");
}
ncclResult_t ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId identity, int rank) {
    return ncclCommInitRankConfig(made, size, identity, rank, nullptr);
}
ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) { return (ncclResult_t)failed(ncclInvalidUsage, "one process has one rank here"); }
ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) { return (ncclResult_t)failed(ncclInvalidUsage, "no communicator is split here"); }
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    planned("ncclCommAbort");
    int number = 0;
    cudaGetDevice(&number);
    if (number != comm->device) end(comm, "it is aborted on another GPU");
    return comm->aborted = true, ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    planned("ncclCommDestroy");
    Lock lock(device().mutex);
    if (!comm->pending.empty() && !comm->aborted) device().finish(lock, End(comm->pending.back()));
    return comm->aborted = true, ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    int status = planned("ncclCommGetAsyncError");
    return *error = (ncclResult_t)(status ? status : comm->error.load()), ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) { return *count = comm->size, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = comm->rank, ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* number) { return *number = comm->device, ncclSuccess; }
ncclResult_t ncclGroupStart() { return ++depth, ncclSuccess; }
ncclResult_t ncclGroupEnd() {
    if (!depth) return ncclInvalidUsage;
    return --depth ? ncclSuccess : launch();
}
ncclResult_t ncclAllReduce(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    return call(ALL_REDUCE, source, target, count, type, operation, 0, 0, comm, stream);
}
ncclResult_t ncclReduce(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root, ncclComm_t comm, cudaStream_t stream) {
    return call(REDUCE, source, target, count, type, operation, root, 0, comm, stream);
}
ncclResult_t ncclBroadcast(const void* source, void* target, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return call(BROADCAST, source, target, count, type, 0, root, 0, comm, stream);
}
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* source, void* target, size_t count, ncclDataType_t type, ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    return call(REDUCE_SCATTER, source, target, count, type, operation, 0, 0, comm, stream);
}
ncclResult_t ncclAllGather(const void* source, void* target, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return call(ALL_GATHER, source, target, count, type, 0, 0, 0, comm, stream);
}
ncclResult_t ncclSend(const void* source, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return call(SEND, source, nullptr, count, type, 0, 0, peer, comm, stream);
}
ncclResult_t ncclRecv(void* target, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return call(RECEIVE, nullptr, target, count, type, 0, 0, peer, comm, stream);
}
}

// A GPU that is none: memory of the host, and streams as queues that a schedule works off. For cuda.cpp and nccl.cpp.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace emulated {

struct Stream;
struct Capture;

// The end of an operation. An event holds that of the last operation before it.
struct Mark {
    Stream* stream = nullptr;
    bool done = false;
};
using End = std::shared_ptr<Mark>;

struct Operation {
    std::function<void()> run;
    std::vector<End> after;
    End end;
    bool waits = false;  // for other processes: only who may wait runs it
};
// Called with the end of an operation that waits for other processes, when it is queued.
using Queued = std::function<void(const End&)>;

struct Stream {
    int device = 0, priority = 0;
    unsigned flags = 0;
    bool gone = false, running = false;
    std::deque<Operation> queue;
    End last;
    Capture* capture = nullptr;
    std::vector<int> captured;  // the nodes after which the next one comes
};

struct Node {
    std::function<void()> run;
    std::vector<int> after;
    Queued queued;
};

// What is recorded, until the stream on which it began ends it.
struct Capture {
    std::vector<Node> nodes;
    std::vector<Stream*> streams;
    Stream* origin;
    int mode;
    std::thread::id thread;
    bool broken = false;
};

using Lock = std::unique_lock<std::mutex>;

class Device {
  public:
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::unique_ptr<Stream>> streams;  // those that are gone too: a handle is never given twice
    std::set<Capture*> captures;
    std::vector<std::function<End()>> peers;  // each returns the end of what another process waits for, if any

    Stream* add(int device, unsigned flags, int priority) {
        streams.push_back(std::make_unique<Stream>());
        Stream* made = streams.back().get();
        made->device = device, made->flags = flags, made->priority = priority;
        return made;
    }

    // Queues an operation, or records it. Without `run` it only waits for `after`.
    void put(Lock& lock, Stream* stream, std::function<void()> run, std::vector<End> after = {},
             Queued queued = nullptr) {
        if (stream->capture) {
            if (!run) return;
            stream->capture->nodes.push_back({std::move(run), stream->captured, std::move(queued)});
            stream->captured = {(int)stream->capture->nodes.size() - 1};
            return;
        }
        order_by_default_stream(stream, after);
        End end = std::make_shared<Mark>();
        end->stream = stream;
        stream->queue.push_back({std::move(run), std::move(after), end, bool(queued)});
        stream->last = end;
        if (queued) queued(end), work();
        changed.notify_all();
        wander(lock);
    }

    // Works off what is queued up to a mark.
    void finish(Lock& lock, const End& mark) {
        while (mark && !mark->done) advance(lock, mark->stream);
    }

    void finish(Lock& lock, Stream* stream) { finish(lock, End(stream->last)); }

    void finish_all(Lock& lock, int device) {
        for (size_t i = 0; i < streams.size(); i++)
            if (streams[i]->device == device) finish(lock, streams[i].get());
    }

    // As finish, but not if it must wait for other processes. Returns whether the mark is done.
    bool try_finish(Lock& lock, const End& mark) {
        while (!mark->done) {
            Stream* next = next_of(mark->stream);
            if (!next) return wished = mark, false;
            step(lock, next);
        }
        return true;
    }

    // By a seed: any stream may go on at any call.
    void wander(Lock& lock) {
        if (!seeded()) return;
        while (random() % 3 == 0) {
            Stream* next = next_of(streams[random() % streams.size()].get());
            if (next) step(lock, next);
        }
    }

    static const char* schedule() {
        static const char* given = getenv("EMULATED_CUDA_SCHEDULE");
        return given ? given : "late";
    }
    static bool seeded() {
        static bool found = std::string("0123456789").find(*schedule()) != std::string::npos;
        return found;
    }
    unsigned random() {
        static std::mt19937 numbers(atoi(schedule()));
        return numbers();
    }

  private:
    End wished;  // what somebody asked for who may not wait

    // Starts the thread that waits for other processes: for what they wait for, and for what was asked for here.
    void work() {
        if (working) return;
        working = true;
        std::thread([this] {
            for (Lock lock(mutex);; changed.wait_for(lock, std::chrono::microseconds(200))) {
                if (wished) finish(lock, std::exchange(wished, nullptr));
                for (size_t i = 0; i < peers.size(); i++) finish(lock, peers[i]());
            }
        }).detach();
    }
    bool working = false;

    // The default stream waits for all others that were not made to run beside it, and they for it.
    void order_by_default_stream(Stream* stream, std::vector<End>& after) {
        if (stream->flags & 1) return;
        Stream* base = default_stream(stream->device);
        for (auto& each : streams)
            if (each.get() != stream && each->device == stream->device && !(each->flags & 1) && each->last &&
                (stream == base || each.get() == base))
                after.push_back(each->last);
    }

    Stream* default_stream(int device) { return streams[device].get(); }

    // The stream whose first operation can run now so that this one gets on; none if that waits or is running.
    Stream* next_of(Stream* stream) {
        while (!stream->running && !stream->queue.empty()) {
            Operation& first = stream->queue.front();
            Stream* before = nullptr;
            for (auto& each : first.after)
                if (!each->done) before = each->stream;
            if (!before) return first.waits ? nullptr : stream;
            stream = before;
        }
        return nullptr;
    }

    void advance(Lock& lock, Stream* stream) {
        for (;;) {
            if (stream->running) return changed.wait(lock);
            Stream* before = nullptr;
            for (auto& each : stream->queue.front().after)
                if (!each->done) before = each->stream;
            if (!before) return step(lock, stream);
            stream = before;
        }
    }

    void step(Lock& lock, Stream* stream) {
        Operation first = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream->running = true;
        lock.unlock();
        if (first.run) first.run();
        lock.lock();
        stream->running = false;
        first.end->done = true;
        changed.notify_all();
    }
};

// What nccl.cpp needs of cuda.cpp, in another library.
Device& device();
Stream* stream_of(void* handle);
bool is_memory(const void* address, size_t size);
// Counts a call, and returns the status that is planned for it. One that is HELD waits until a test plans anew, or until
// the communicator is aborted.
constexpr int HELD = -1;
int planned(const char* name, const std::atomic<bool>* aborted = nullptr);

}  // namespace emulated

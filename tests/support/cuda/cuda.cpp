// The driver of CUDA and its runtime, for a machine without a GPU: what CuPy calls of both.
#include <cuda_runtime_api.h>
#include <cuda.h>
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "device.h"
#undef cudaGetDeviceProperties
#undef cuGetProcAddress
#undef cuLinkCreate
#undef cuLinkAddData

using namespace emulated;

namespace {

struct Event {
    End mark;
    Capture* capture = nullptr;
    std::vector<int> nodes;
    int asked = 0;
    bool gone = false, timed = true, recorded = false;
};

struct Allocation {
    size_t size, asked;
    int device;  // -1: pinned memory of the host
};

// A graph, or one that can be launched.
struct Graph {
    std::vector<Node> nodes;
    bool gone = false;
};

struct Function {
    void (*run)(const void*);
    const int* parameters;
    int device;
};

struct Module {
    void* library;
    int device;
};

struct Launch {
    unsigned grid[3], block[3], shared, backwards;
    const char* given;
};

constexpr size_t MEMORY = 16ull << 30;  // of which ranks that share a GPU take a fifth each
std::map<uintptr_t, Allocation> memory;
size_t taken[16];
thread_local int current = 0;
thread_local int exchanged = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::map<int, Stream*> own_streams;

int count_devices() {
    static const char* given = getenv("EMULATED_CUDA_DEVICES");
    static int count = given ? atoi(given) : 4;
    return count;
}

void tell(const char* what, const char* name) { fprintf(stderr, "emulated CUDA: %s: %s\n", name, what); }

// "cudaMalloc:3=2,cudaEventQuery:1=700": the third call of the one returns 2, the first of the other 700. The variable
// EMULATED_CUDA_FAIL plans so, and a test for its own process.
std::map<std::string, std::pair<int, int>> wanted;
std::map<std::string, int> counted;
int plans = 0;

bool plan(const std::string& text) {
    wanted.clear();
    for (size_t at = 0; at < text.size();) {
        size_t colon = text.find(':', at), equals = text.find('=', colon), end = text.find(',', equals);
        wanted[text.substr(at, colon - at)] = {atoi(&text[colon + 1]), atoi(&text[equals + 1])};
        at = end == std::string::npos ? text.size() : end + 1;
    }
    return ++plans;
}
const bool planned_before = plan(getenv("EMULATED_CUDA_FAIL") ? getenv("EMULATED_CUDA_FAIL") : "");

int injected(const char* name) {
    counted[name]++;
    auto found = wanted.find(name);
    return found != wanted.end() && --found->second.first == 0 ? found->second.second : 0;
}

// Whether this thread may call what might wait for a GPU or change its memory.
bool forbidden() {
    for (Capture* each : device().captures) {
        bool own = each->thread == std::this_thread::get_id();
        if (each->mode == cudaStreamCaptureModeRelaxed || exchanged == cudaStreamCaptureModeRelaxed) continue;
        if (own || (each->mode == cudaStreamCaptureModeGlobal && exchanged == cudaStreamCaptureModeGlobal)) {
            each->broken = true;
            return true;
        }
    }
    return false;
}

cudaError_t failed(int status) { return last_error = (cudaError_t)status; }

std::vector<End> no_end;

std::map<uintptr_t, Allocation>::iterator find(const void* address) {
    auto next = memory.upper_bound((uintptr_t)address);
    if (next == memory.begin()) return memory.end();
    --next;
    return (uintptr_t)address < next->first + next->second.size ? next : memory.end();
}

bool usable(Event* event, const char* name) {
    if (!event->gone) return true;
    tell("the event was destroyed", name);
    return false;
}

bool usable(Stream* stream, const char* name) {
    if (!stream->gone) return true;
    tell("the stream was destroyed", name);
    return false;
}

}  // namespace

#define ENTER(name)                                        \
    Lock lock(device().mutex);                             \
    if (int status = injected(name)) return failed(status)
#define UNSAFE(name)                                       \
    ENTER(name);                                           \
    if (forbidden()) return failed(cudaErrorStreamCaptureUnsupported)
#define STREAM(handle, name)                               \
    Stream* stream = stream_of(handle);                    \
    if (!usable(stream, name)) return failed(cudaErrorInvalidResourceHandle)
#define EVENT(handle, name)                                \
    Event* event = (Event*)handle;                         \
    if (!usable(event, name)) return failed(cudaErrorInvalidResourceHandle)

namespace emulated {

Device& device() {
    static Device* made = [] {
        auto* one = new Device;  // never destroyed: threads may use it when the process ends
        for (int i = 0; i < count_devices(); i++) one->add(i, 0, 0);
        return one;
    }();
    return *made;
}

Stream* stream_of(void* handle) {
    if ((uintptr_t)handle <= 1) return device().streams[current].get();
    if ((uintptr_t)handle > 2) return (Stream*)handle;
    Stream*& own = own_streams[current];
    return own ? own : own = device().add(current, 0, 0);
}

bool is_memory(const void* address, size_t size) {
    Lock lock(device().mutex);
    auto found = find(address);
    return found != memory.end() && (uintptr_t)address + size <= found->first + found->second.size;
}

int planned(const char* name, const std::atomic<bool>* aborted) {
    Lock lock(device().mutex);
    int status = injected(name), since = plans;
    while (status == HELD && plans == since && !(aborted && *aborted)) device().changed.wait_for(lock, std::chrono::milliseconds(1));
    return status == HELD ? 0 : status;
}

}  // namespace emulated

extern "C" {

// A test plans failures of this process, and asks how often a function was called.
void emulated_plan(const char* text) {
    Lock lock(device().mutex);
    plan(text);
}
int emulated_calls(const char* name) {
    Lock lock(device().mutex);
    return counted[name];
}

// For kernels.
int emulated_find(uint64_t address, uint64_t size, uint64_t* low, uint64_t* high) {
    Lock lock(device().mutex);
    auto found = find((void*)address);
    if (found == memory.end() || address + size > found->first + found->second.size) return 0;
    *low = found->first, *high = found->first + found->second.size;
    return 1;
}
// As in ptx.h. A test has kernels note what they use while there is room, and of each grid only the last blocks run.
struct Watch {
    void* accesses;
    uint64_t room, found;
    unsigned launches, last;
} emulated_watch;
// A test lends memory, of more pages than there are.
void emulated_lend(uintptr_t address, size_t size) {
    Lock lock(device().mutex);
    memory[address] = {size, size, 0};
}

// --- Devices

cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDA_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
    ENTER("cudaGetDeviceCount");
    return *count = count_devices(), *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* number) { return *number = current, cudaSuccess; }
cudaError_t cudaSetDevice(int number) {
    ENTER("cudaSetDevice");
    if (number < 0 || number >= count_devices()) return failed(cudaErrorInvalidDevice);
    return current = number, cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
    static const std::map<int, int> known = {
        {cudaDevAttrComputeCapabilityMajor, 9},    {cudaDevAttrComputeCapabilityMinor, 0},
        {cudaDevAttrMultiProcessorCount, 4},       {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrMaxGridDimX, 0x7fffffff},      {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
        {cudaDevAttrWarpSize, 32},                 {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrUnifiedAddressing, 1},
    };
    auto found = known.find(name);
    return *value = found == known.end() ? 0 : found->second, cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int number) {
    return snprintf(text, size, "0000:%02x:00.0", (unsigned char)(number + 1)), cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int number) {
    if (number < 0 || number >= count_devices()) return failed(cudaErrorInvalidDevice);
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "emulated GPU");
    found->uuid.bytes[0] = (char)(number + 1);
    found->major = 9, found->totalGlobalMem = MEMORY, found->multiProcessorCount = 4, found->warpSize = 32;
    found->maxThreadsPerBlock = 1024, found->sharedMemPerBlock = 48 << 10, found->maxThreadsPerMultiProcessor = 2048;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    UNSAFE("cudaDeviceSynchronize");
    device().finish_all(lock, current);
    return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t error) {
    static const std::map<int, const char*> names = {
        {0, "cudaSuccess"}, {1, "cudaErrorInvalidValue"}, {2, "cudaErrorMemoryAllocation"}, {35, "cudaErrorInsufficientDriver"},
        {100, "cudaErrorNoDevice"}, {101, "cudaErrorInvalidDevice"}, {400, "cudaErrorInvalidResourceHandle"},
        {600, "cudaErrorNotReady"}, {700, "cudaErrorIllegalAddress"}, {719, "cudaErrorLaunchFailure"},
        {801, "cudaErrorNotSupported"}, {900, "cudaErrorStreamCaptureUnsupported"}, {901, "cudaErrorStreamCaptureInvalidated"},
        {903, "cudaErrorStreamCaptureUnmatched"}, {904, "cudaErrorStreamCaptureUnjoined"}, {905, "cudaErrorStreamCaptureIsolation"},
        {906, "cudaErrorStreamCaptureImplicit"}, {907, "cudaErrorCapturedEvent"}, {908, "cudaErrorStreamCaptureWrongThread"}};
    auto found = names.find(error);
    return found == names.end() ? "cudaErrorUnknown" : found->second;
}
const char* cudaGetErrorString(cudaError_t) { return "of the emulated GPU"; }
cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    return last_error = cudaSuccess, error;
}

// --- Memory

cudaError_t cudaMemGetInfo(size_t* left, size_t* all) {
    ENTER("cudaMemGetInfo");
    return *left = MEMORY - taken[current], *all = MEMORY, cudaSuccess;
}
static cudaError_t allocate(void** address, size_t asked, int where) {
    size_t size = (std::max<size_t>(asked, 1) + 511) / 512 * 512;
    if (where >= 0 && taken[where] + size > MEMORY) return failed(cudaErrorMemoryAllocation);
    *address = aligned_alloc(512, size);
    if (!*address) return failed(cudaErrorMemoryAllocation);
    memset(*address, 0xff, size);  // NaN, so that what nobody has written does not pass for zeros
    memory[(uintptr_t)*address] = {size, asked, where};
    if (where >= 0) taken[where] += size;
    return cudaSuccess;
}
static cudaError_t release(Lock& lock, void* address, bool pinned) {
    if (!address) return cudaSuccess;
    auto found = memory.find((uintptr_t)address);
    if (found == memory.end() || (found->second.device < 0) != pinned) return failed(cudaErrorInvalidValue);
    for (int i = 0; i < count_devices(); i++) device().finish_all(lock, i);
    found = memory.find((uintptr_t)address);
    if (!pinned) taken[found->second.device] -= found->second.size;
    memory.erase(found);
    free(address);
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** address, size_t size) {
    UNSAFE("cudaMalloc");
    return allocate(address, size, current);
}
cudaError_t cudaFree(void* address) {
    UNSAFE("cudaFree");
    return release(lock, address, false);
}
cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
    UNSAFE("cudaHostAlloc");
    return allocate(address, size, -1);
}
cudaError_t cudaFreeHost(void* address) {
    UNSAFE("cudaFreeHost");
    return release(lock, address, true);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
    ENTER("cudaPointerGetAttributes");
    auto where = find(address);
    memset(found, 0, sizeof *found);
    found->type = where == memory.end()         ? cudaMemoryTypeUnregistered
                  : where->second.device < 0 ? cudaMemoryTypeHost
                                             : cudaMemoryTypeDevice;
    found->device = where == memory.end() ? -1 : std::max(where->second.device, 0);
    found->devicePointer = found->hostPointer = (void*)address;
    return cudaSuccess;
}

// --- Copies

// Of pageable memory the bytes are taken at once, and into it they are waited for. Pinned memory is used when the copy runs.
static cudaError_t copy(Lock& lock, void* target, const void* source, size_t size, Stream* stream) {
    bool from_pages = find(source) == memory.end(), to_pages = find(target) == memory.end();
    if (from_pages && !stream->capture) {
        auto kept = std::make_shared<std::string>((const char*)source, size);
        device().put(lock, stream, [=] { memcpy(target, kept->data(), size); });
    } else {
        device().put(lock, stream, [=] { memmove(target, source, size); });
    }
    if (to_pages && !stream->capture) device().finish(lock, stream);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, cudaMemcpyKind, cudaStream_t handle) {
    ENTER("cudaMemcpyAsync");
    STREAM(handle, "cudaMemcpyAsync");
    return copy(lock, target, source, size, stream);
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t size, cudaMemcpyKind) {
    UNSAFE("cudaMemcpy");
    Stream* stream = stream_of(nullptr);
    copy(lock, target, source, size, stream);
    device().finish(lock, stream);
    return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size, cudaStream_t handle) {
    return cudaMemcpyAsync(target, source, size, cudaMemcpyDefault, handle);
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t handle) {
    ENTER("cudaMemsetAsync");
    STREAM(handle, "cudaMemsetAsync");
    device().put(lock, stream, [=] { memset(target, value, size); });
    return cudaSuccess;
}
cudaError_t cudaMemset(void* target, int value, size_t size) { return cudaMemsetAsync(target, value, size, nullptr); }

// --- Streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int priority) {
    ENTER("cudaStreamCreateWithPriority");
    *made = (cudaStream_t)device().add(current, flags, std::clamp(priority, -5, 0));
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
    return cudaStreamCreateWithPriority(made, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* made) { return cudaStreamCreateWithPriority(made, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    ENTER("cudaStreamDestroy");
    STREAM(handle, "cudaStreamDestroy");
    return stream->gone = true, cudaSuccess;  // what is queued is done all the same
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    UNSAFE("cudaStreamSynchronize");
    STREAM(handle, "cudaStreamSynchronize");
    if (stream->capture) return failed(cudaErrorStreamCaptureUnsupported);
    device().finish(lock, stream);
    return cudaSuccess;
}
static cudaError_t ask(Lock& lock, const End& mark, int* asked) {
    if (!mark || mark->done) return cudaSuccess;
    int patience = Device::seeded() ? device().random() % 6 : 3;
    if (++*asked <= patience) return cudaErrorNotReady;
    return device().try_finish(lock, mark) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    UNSAFE("cudaStreamQuery");
    STREAM(handle, "cudaStreamQuery");
    static int asked;
    return ask(lock, stream->last, &asked);
}
cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) { return *flags = stream_of(handle)->flags, cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
    return *priority = stream_of(handle)->priority, cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t which, unsigned) {
    ENTER("cudaStreamWaitEvent");
    STREAM(handle, "cudaStreamWaitEvent");
    EVENT(which, "cudaStreamWaitEvent");
    if (event->capture) {
        if (!stream->capture) {
            stream->capture = event->capture;
            stream->captured.clear();
            event->capture->streams.push_back(stream);
        } else if (stream->capture != event->capture) {
            return failed(905);  // cudaErrorStreamCaptureIsolation
        }
        stream->captured.insert(stream->captured.end(), event->nodes.begin(), event->nodes.end());
        return cudaSuccess;
    }
    if (stream->capture && event->recorded) return stream->capture->broken = true, failed(905);
    if (event->mark && !event->mark->done) device().put(lock, stream, nullptr, {event->mark});
    return cudaSuccess;
}

// --- Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
    ENTER("cudaEventCreateWithFlags");
    auto* event = new Event;
    event->timed = !(flags & cudaEventDisableTiming);
    return *made = (cudaEvent_t)event, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t which) {
    ENTER("cudaEventDestroy");
    EVENT(which, "cudaEventDestroy");
    return event->gone = true, cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t which, cudaStream_t handle) {
    ENTER("cudaEventRecord");
    STREAM(handle, "cudaEventRecord");
    EVENT(which, "cudaEventRecord");
    event->recorded = true;
    event->capture = stream->capture;
    event->asked = 0;
    if (stream->capture) return event->nodes = stream->captured, event->mark = nullptr, cudaSuccess;
    device().put(lock, stream, nullptr);
    return event->mark = stream->last, cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t which) {
    UNSAFE("cudaEventQuery");
    EVENT(which, "cudaEventQuery");
    if (event->capture) return failed(cudaErrorCapturedEvent);
    return ask(lock, event->mark, &event->asked);
}
cudaError_t cudaEventSynchronize(cudaEvent_t which) {
    UNSAFE("cudaEventSynchronize");
    EVENT(which, "cudaEventSynchronize");
    if (event->capture) return failed(cudaErrorCapturedEvent);
    device().finish(lock, End(event->mark));
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
    ENTER("cudaEventElapsedTime");
    Event *begin = (Event*)first, *end = (Event*)second;
    if (!begin->timed || !end->timed || !begin->recorded || !end->recorded) return failed(cudaErrorInvalidResourceHandle);
    if ((begin->mark && !begin->mark->done) || (end->mark && !end->mark->done)) return cudaErrorNotReady;
    return *milliseconds = 1, cudaSuccess;
}

// --- Graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    ENTER("cudaStreamBeginCapture");
    STREAM(handle, "cudaStreamBeginCapture");
    if ((uintptr_t)handle <= 1) return failed(cudaErrorStreamCaptureUnsupported);
    if (stream->capture) return failed(cudaErrorInvalidValue);
    auto* capture = new Capture{{}, {stream}, stream, mode, std::this_thread::get_id()};
    device().captures.insert(capture);
    stream->captured.clear();
    return stream->capture = capture, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* made) {
    ENTER("cudaStreamEndCapture");
    STREAM(handle, "cudaStreamEndCapture");
    Capture* capture = stream->capture;
    *made = nullptr;
    if (!capture) return failed(cudaErrorInvalidValue);
    if (stream != capture->origin) return failed(903);  // cudaErrorStreamCaptureUnmatched
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) return failed(908);
    // All other streams must have been joined: the last node of each comes before the end.
    std::set<int> before;
    std::vector<int> open = stream->captured;
    while (!open.empty()) {
        int node = open.back();
        open.pop_back();
        if (before.insert(node).second) open.insert(open.end(), capture->nodes[node].after.begin(), capture->nodes[node].after.end());
    }
    bool joined = before.size() == capture->nodes.size();
    for (Stream* each : capture->streams) each->capture = nullptr, each->captured.clear();
    device().captures.erase(capture);
    if (capture->broken) return failed(901);
    if (!joined) return failed(904);
    return *made = (cudaGraph_t) new Graph{capture->nodes}, cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* found) {
    ENTER("cudaStreamIsCapturing");
    STREAM(handle, "cudaStreamIsCapturing");
    *found = !stream->capture         ? cudaStreamCaptureStatusNone
             : stream->capture->broken ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    ENTER("cudaGraphInstantiate");
    return *made = (cudaGraphExec_t) new Graph(*(Graph*)graph), cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
// A graph's nodes run in any order that its edges allow: the last that can first, or any by a seed.
cudaError_t cudaGraphLaunch(cudaGraphExec_t which, cudaStream_t handle) {
    ENTER("cudaGraphLaunch");
    STREAM(handle, "cudaGraphLaunch");
    if (((Graph*)which)->gone) return tell("the graph was destroyed", "cudaGraphLaunch"), failed(cudaErrorInvalidResourceHandle);
    auto nodes = ((Graph*)which)->nodes;
    auto order = std::make_shared<std::vector<std::function<void()>>>();
    std::vector<bool> done(nodes.size());
    for (size_t count = 0; count < nodes.size(); count++) {
        std::vector<int> ready;
        for (int i = nodes.size(); i--;)
            if (!done[i] && std::all_of(nodes[i].after.begin(), nodes[i].after.end(), [&](int each) { return done[each]; }))
                ready.push_back(i);
        int next = ready[Device::seeded() ? device().random() % ready.size() : 0];
        done[next] = true;
        order->push_back(nodes[next].run);
    }
    Queued queued;
    if (std::any_of(nodes.begin(), nodes.end(), [](auto& each) { return bool(each.queued); }))
        queued = [nodes](const End& end) {
            for (auto& each : nodes)
                if (each.queued) each.queued(end);
        };
    device().put(lock, stream, [order] { for (auto& each : *order) each(); }, {}, queued);
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return ((Graph*)graph)->gone = true, cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    ENTER("cudaGraphExecDestroy");
    return ((Graph*)graph)->gone = true, cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
    ENTER("cudaLaunchHostFunc");
    STREAM(handle, "cudaLaunchHostFunc");
    device().put(lock, stream, [=] { function(data); });
    return cudaSuccess;
}

// --- The driver

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
// CUDA's own libraries look for tables that nobody documents, and do without where there are none.
CUresult cuGetExportTable(const void** table, const CUuuid*) { return *table = nullptr, CUDA_ERROR_NOT_FOUND; }
CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return *count = count_devices(), CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* text, int size, CUdevice) { return snprintf(text, size, "emulated GPU"), CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char** text) { return *text = cudaGetErrorName((cudaError_t)error), CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "of the emulated GPU", CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* found) { return *found = (CUcontext)(uintptr_t)(current + 1), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    int before = exchanged;
    exchanged = *mode;
    return *mode = (CUstreamCaptureMode)before, CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* made, const void* image) {
    const char* text = (const char*)image;
    if (strncmp(text, "//", 2)) return tell("no PTX: set CUPY_COMPILE_WITH_PTX=1", "cuModuleLoadData"), CUDA_ERROR_INVALID_IMAGE;
    uint64_t name[2] = {14695981039346656037ull, 7};
    for (const char* c = text; *c; c++) name[0] = (name[0] ^ (unsigned char)*c) * 1099511628211ull, name[1] = name[1] * 31 + name[0];
    const char *python = getenv("EMULATED_CUDA_PYTHON"), *translator = getenv("EMULATED_CUDA_TRANSLATOR"),
               *folder = getenv("EMULATED_CUDA_KERNELS");
    char path[500];
    snprintf(path, sizeof path, "%s/%016lx%016lx", folder, name[0], name[1]);
    std::string target = std::string(path) + ".so", source = std::string(path) + "." + std::to_string(getpid()) + ".ptx";
    if (access(target.c_str(), R_OK)) {
        FILE* file = fopen(source.c_str(), "w");
        if (!file) return tell("cannot write the kernel", source.c_str()), CUDA_ERROR_INVALID_IMAGE;
        fputs(text, file);
        fclose(file);
        Dl_info own;
        dladdr((void*)cuModuleLoadData, &own);
        std::string line = std::string(python) + " -S -E " + translator + " " + source + " " + target + " " + own.dli_fname;
        if (system(line.c_str())) return tell("cannot be translated", source.c_str()), CUDA_ERROR_INVALID_PTX;
        unlink(source.c_str());
    }
    void* loaded = dlopen(target.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!loaded) return tell(dlerror(), "cuModuleLoadData"), CUDA_ERROR_INVALID_IMAGE;
    return *made = (CUmodule) new Module{loaded, current}, CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) {
    Lock lock(device().mutex);
    for (int i = 0; i < count_devices(); i++) device().finish_all(lock, i);
    return delete (Module*)module, CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* made, CUmodule module, const char* name) {
    void* library = ((Module*)module)->library;
    void* run = dlsym(library, (std::string("run_") + name).c_str());
    if (!run) return CUDA_ERROR_NOT_FOUND;
    auto* parameters = (const int*)dlsym(library, (std::string("parameters_") + name).c_str());
    return *made = (CUfunction) new Function{(void (*)(const void*))run, parameters, ((Module*)module)->device}, CUDA_SUCCESS;
}
CUresult cuModuleGetGlobal(CUdeviceptr*, size_t*, CUmodule, const char*) { return CUDA_ERROR_NOT_FOUND; }
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute name, CUfunction) {
    return *value = name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction, int, size_t) { return *count = 2, CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction which, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream handle, void** arguments, void**) {
    Lock lock(device().mutex);
    if (int status = injected("cuLaunchKernel")) return (CUresult)status;
    Stream* stream = stream_of(handle);
    if (!usable(stream, "cuLaunchKernel")) return CUDA_ERROR_INVALID_HANDLE;
    if (!gx || !gy || !gz || !bx || !by || !bz || gy > 65535 || gz > 65535 || bx * by * bz > 1024 || shared > 227 << 10)
        return CUDA_ERROR_INVALID_VALUE;
    auto* function = (Function*)which;
    if (function->device != current) return tell("the kernel is of another GPU", "cuLaunchKernel"), CUDA_ERROR_INVALID_HANDLE;
    if (stream->device != current) return tell("the stream is of another GPU", "cuLaunchKernel"), CUDA_ERROR_INVALID_HANDLE;
    const int *at = function->parameters, count = at[0], size = at[1];
    auto given = std::shared_ptr<char>((char*)aligned_alloc(256, (size + 511) / 256 * 256), free);
    for (int i = 0; i < count; i++) memcpy(given.get() + at[2 + 2 * i], arguments[i], at[3 + 2 * i]);
    unsigned backwards = Device::seeded() ? device().random() % 2 : 0;
    device().put(lock, stream, [=] {
        Launch launch{{gx, gy, gz}, {bx, by, bz}, shared, backwards, given.get()};
        function->run(&launch);
    });
    return CUDA_SUCCESS;
}

// The linker passes on what it was given.
CUresult cuLinkCreate(unsigned, CUjit_option*, void**, CUlinkState* made) {
    return *made = (CUlinkState) new std::string, CUDA_SUCCESS;
}
CUresult cuLinkAddData(CUlinkState state, CUjitInputType, void* data, size_t size, const char*, unsigned, CUjit_option*, void**) {
    return ((std::string*)state)->assign((char*)data, size), CUDA_SUCCESS;
}
CUresult cuLinkComplete(CUlinkState state, void** data, size_t* size) {
    auto* text = (std::string*)state;
    return *data = (void*)text->c_str(), *size = text->size() + 1, CUDA_SUCCESS;
}
CUresult cuLinkDestroy(CUlinkState state) { return delete (std::string*)state, CUDA_SUCCESS; }

// What is missing here says its name.
int emulated_missing(const char* name) {
    tell("is not emulated", name);
    return cudaErrorNotSupported;
}
}

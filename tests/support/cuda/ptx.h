// What kernels translated by ptx.py are made of: PTX's types, its conversions, and checks of every access.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint8_t u8, b8;
typedef uint16_t u16, b16;
typedef uint32_t u32, b32;
typedef uint64_t u64, b64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;
typedef _Float16 f16;

struct Launch {
    u32 grid[3], block[3], shared, backwards;
    const char* given;
};

// The driver's: whether memory of the GPU holds these bytes, and the allocation's bounds.
extern int emulated_find(u64 address, u64 size, u64* low, u64* high);

// What tests/support/watching.py looks at: each use of memory that other threads may use, too.
struct Access {
    u64 address;
    u32 launch, block, phase;
    u16 thread;
    u8 size, kind;  // 1: it writes; 2: memory of a block
};
extern struct Watch {
    struct Access* accesses;
    u64 room, found;
    u32 launches, last;
} emulated_watch;

struct Place {
    u32 tid[3], ntid[3], ctaid[3], nctaid[3];
    u64 room;
    char *shared, *local;
    const char* given;
    u64 low[8], high[8], size;
    u32 oldest, launch, phase;
    const char* name;
};

static inline u32 bits_f32(f32 value) { u32 bits; memcpy(&bits, &value, 4); return bits; }
static inline f32 f32_bits(u32 bits) { f32 value; memcpy(&value, &bits, 4); return value; }
static inline u64 bits_f64(f64 value) { u64 bits; memcpy(&bits, &value, 8); return bits; }
static inline f64 f64_bits(u64 bits) { f64 value; memcpy(&value, &bits, 8); return value; }
static inline u16 bits_f16(f16 value) { u16 bits; memcpy(&bits, &value, 2); return bits; }
static inline f16 f16_bits(u16 bits) { f16 value; memcpy(&value, &bits, 2); return value; }
static inline f32 bf16_bits(u16 bits) { return f32_bits((u32)bits << 16); }
static inline u16 bits_bf16(f32 value) {
    u32 bits = bits_f32(value);
    return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static inline f32 flushed(f32 value) { return fabsf(value) < 0x1p-126f ? copysignf(0, value) : value; }
// An approximate operation may be wrong in the last place. Here it always is.
static inline f32 nearly(f32 value) { return value - value == 0 ? nextafterf(value, 0) : value; }

// PTX clamps numbers that are too large. Of a NaN it makes 0, or the lowest number where one of the two has 64 bits.
static inline s64 to_s(f64 value, int bits, int wide) {
    s64 low = bits == 64 ? INT64_MIN : -(1ll << (bits - 1)), high = -(low + 1);
    if (value != value) return wide || bits == 64 ? low : 0;
    return value <= (f64)low ? low : value >= (f64)high ? high : (s64)value;
}
static inline u64 to_u(f64 value, int bits, int wide) {
    u64 high = bits == 64 ? UINT64_MAX : (1ull << bits) - 1;
    if (value != value) return wide || bits == 64 ? 1ull << (bits - 1) : 0;
    return value <= 0 ? 0 : value >= (f64)high ? high : (u64)value;
}

static inline u32 permuted(u32 a, u32 b, u32 selection) {
    u64 both = (u64)b << 32 | a;
    u32 found = 0;
    for (int i = 0; i < 4; i++) {
        u32 pick = selection >> 4 * i & 15, byte = both >> 8 * (pick & 7) & 255;
        found |= (pick & 8 ? (byte & 128 ? 255u : 0) : byte) << 8 * i;
    }
    return found;
}

static inline u64 field(u64 value, u32 first, u32 count) {
    return first > 63 ? 0 : value >> first & (count > 63 ? ~0ull : (1ull << count) - 1);
}

static void wrong(const struct Place* place, const char* why, u64 address, u64 size) {
    fprintf(stderr, "emulated CUDA: %s: %s, %d bytes at %#llx, in block %u, thread %u of %u\n", place->name, why, (int)size,
            (unsigned long long)address, place->ctaid[0], place->tid[0], place->ntid[0]);
    abort();
}

// Generic and global addresses are the host's. The first three bounds are a thread's own memory, the others of the last
// allocations that were used.
static char* found(struct Place* place, u64 address, u64 size) {
    for (int i = 0; i < 8; i++)
        if (address >= place->low[i] && address + size <= place->high[i]) return (char*)address;
    u32 next = 3 + place->oldest++ % 5;
    if (!emulated_find(address, size, place->low + next, place->high + next))
        wrong(place, "access outside of any allocation", address, size);
    return (char*)address;
}
static void note(const struct Place* place, u64 address, u64 size, int writes) {
    int own = 0;
    for (; own < 3; own++)
        if (address >= place->low[own] && address < place->high[own]) break;
    if (own == 0 || own == 2) return;
    struct Watch* watch = &emulated_watch;
    if (watch->found < watch->room)
        watch->accesses[watch->found] = (struct Access){
            address, place->launch, place->ctaid[0], place->phase, place->tid[0], size, writes | (own == 1) << 1};
    watch->found++;
}
static inline char* at(struct Place* place, u64 address, u64 size, int writes) {
    if (address % size) wrong(place, "misaligned access", address, size);
    if (emulated_watch.room) note(place, address, size, writes);
    return found(place, address, size);
}

static inline char* within(struct Place* place, const char* base, u64 room, u64 offset, u64 size, int writes) {
    if (offset % size) wrong(place, "misaligned access", offset, size);
    if (offset + size > room) wrong(place, "access beyond shared memory or arguments", offset, size);
    if (emulated_watch.room) note(place, (u64)base + offset, size, writes);
    return (char*)base + offset;
}

// A clock on which every look takes long.
static __thread u64 clock_now;
static inline u64 ticked(void) { return clock_now += 1000000000; }

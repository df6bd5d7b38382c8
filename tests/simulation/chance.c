/* Preloaded into a simulation: pylance names its files by what this gives out, in the order of an actor's own seed. */
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

static uint64_t state = 1;

void simulation_seed(uint64_t seed) { state = seed; }

static uint64_t next(void) {
    uint64_t z = __atomic_add_fetch(&state, 0x9E3779B97F4A7C15ull, __ATOMIC_RELAXED);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* Keys of hash tables are asked for with a flag, by whichever thread comes first: they are always the same. */
ssize_t getrandom(void *buffer, size_t length, unsigned int flags) {
    unsigned char *bytes = buffer;
    for (size_t at = 0; at < length; at++)
        bytes[at] = flags ? (unsigned char)(at + 1) : (unsigned char)next();
    return (ssize_t)length;
}

/* Preloaded into a process, it makes the process's time of day wrong by what a file says.
 *
 * The file named by CHAOS_CLOCK holds one int64, the offset in microseconds; it is mapped, so that a write to it is
 * seen at once. Monotonic clocks stay as they are. libfaketime does the same and more, but ends in a recursion when
 * the process's malloc is jemalloc, as Redis's is on Debian; here nothing allocates and nothing is looked up.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void map_offset(void)
{
    const char *path = getenv("CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0)
        return;
    void *found = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED)
        offset = found;
}

static int wrong_time(clockid_t clock, struct timespec *out)
{
    int result = syscall(SYS_clock_gettime, clock, out);
    if (result == 0 && offset && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t micros = (int64_t)out->tv_sec * 1000000 + out->tv_nsec / 1000 + *offset;
        long rest = out->tv_nsec % 1000;
        out->tv_sec = micros / 1000000;
        out->tv_nsec = micros % 1000000 * 1000 + rest;
    }
    return result;
}

int clock_gettime(clockid_t clock, struct timespec *out)
{
    return wrong_time(clock, out);
}

int gettimeofday(struct timeval *restrict out, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    if (wrong_time(CLOCK_REALTIME, &now) != 0)
        return -1;
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out)
{
    struct timespec now;
    wrong_time(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}

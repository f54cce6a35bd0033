/* A job that knows when it ran: stamp FILE [SECONDS] appends "start end" (CLOCK_MONOTONIC, ns)
 * to FILE.  In C, because an interpreter's own start would be counted as the queue's. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static long long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int main(int argc, char **argv) {
  long long start = now_ns();
  if (argc < 2) return 2;
  double seconds = argc > 2 ? atof(argv[2]) : 0.05;
  struct timespec nap = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
  nanosleep(&nap, NULL);
  int fd = open(argv[1], O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return 1;
  return dprintf(fd, "%lld %lld\n", start, now_ns()) < 0;
}

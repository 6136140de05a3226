/* A rank that waits in Open MPI calls sched_yield all the time. Where ranks and other tests share few cores, that takes
 * up to five times the processor time of the work. Preloaded, this lets it sleep. */
#include <time.h>

int sched_yield(void) {
  const struct timespec pause = {0, 100000};
  nanosleep(&pause, 0);
  return 0;
}

/* forker [CHILDREN [CALLS [PARENT_CALLS]]]: a parent, forked children, and one child that also executes itself anew.
 *
 * Prints "ready" and waits for a line. The parent makes PARENT_CALLS launches, forks, and each child makes CALLS
 * launches and one wait of 1 ms; the last child first replaces itself by exec. Children report through a pipe.
 */
#include <sys/wait.h>

#include "sim_cudart.h"

/* clang-format off */
#define APIS(X) \
  X(cudaLaunchKernel) X(cudaStreamSynchronize)
/* clang-format on */
#include "target.h"

struct report {
  int pid, exec;
  struct tally tally;
};

static void kernel_stub(void) {}

static void calls(struct tally *tally, unsigned long count) {
  dim3 one = {1, 1, 1};
  for (unsigned long i = 0; i < count; i++) CALL(tally, cudaLaunchKernel, (void *)kernel_stub, one, one, NULL, 0, NULL);
  if (!count) return;
  stallscope_sim_set_next_kernel_ns(1000000);
  CALL(tally, cudaLaunchKernel, (void *)kernel_stub, one, one, NULL, 0, NULL);
  TIMED(tally, cudaStreamSynchronize, NULL);
}

static void child(int fd, unsigned long count, int exec) {
  struct report report = {.pid = getpid(), .exec = exec};
  const char *delay = getenv("FORKER_CHILD_DELAY_US");
  if (delay) usleep((useconds_t)atoi(delay));
  calls(&report.tally, count);
  if (write(fd, &report, sizeof(report)) != sizeof(report)) _exit(1);
  _exit(0);
}

static void exec_self(const char *self, int fd, unsigned long count) {
  char fd_text[16], count_text[32];
  snprintf(fd_text, sizeof(fd_text), "%d", fd);
  snprintf(count_text, sizeof(count_text), "%lu", count);
  execl("/proc/self/exe", self, "--child", fd_text, count_text, (char *)NULL);
  _exit(127);
}

static void print_children(int fd, unsigned long children) {
  struct report report;
  printf(", \"children\": [");
  for (unsigned long i = 0; i < children; i++) {
    if (read(fd, &report, sizeof(report)) != sizeof(report)) exit(1);
    printf("%s{\"pid\": %d, \"exec\": %s, ", i ? ", " : "", report.pid, report.exec ? "true" : "false");
    tally_print("", &report.tally);
    printf("}");
  }
  printf("]");
}

int main(int argc, char **argv) {
  int fds[2];
  struct tally tally = {0};
  setenv("STALLSCOPE_SIM_KERNEL_NS", "1", 0);
  if (argc == 4 && strcmp(argv[1], "--child") == 0) child(atoi(argv[2]), strtoul(argv[3], NULL, 10), 1);
  unsigned long children = argument(argc, argv, 1, 3), count = argument(argc, argv, 2, 1000);
  if (pipe(fds)) return 1;
  ready();
  calls(&tally, argument(argc, argv, 3, 100));
  for (unsigned long i = 0; i < children; i++) {
    pid_t pid = fork();
    if (pid == 0 && i == children - 1) exec_self(argv[0], fds[1], count);
    if (pid == 0) child(fds[1], count, 0);
  }
  close(fds[1]);
  printf("{\"target\": \"forker\", \"pid\": %d, ", getpid());
  tally_print("", &tally);
  print_children(fds[0], children);
  puts("}");
  while (wait(NULL) > 0)
    ;
  return 0;
}

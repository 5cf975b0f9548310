// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE
#include "system.h"
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

/* In the child of a fork. Where the kernel emptied the pages only what the thread itself holds is left: the place it
 * points to may become another thread's. */
static void forget(void) {
  struct seg_process *p = seg_proc;
  seg_leave_behind();
  if (p && p->state) memset(p, 0, sizeof(*p));
}

/* Both: before Linux 4.14 no kernel empties pages at a fork, and some that run programs of others only say they do;
 * glibc's handler sees every fork but raw system calls. */
void *seg_private(size_t bytes) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return NULL;
  madvise(p, bytes, SEG_WIPEONFORK);
  pthread_atfork(NULL, NULL, forget);
  return p;
}

uint64_t seg_clock_ns(int clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* The closest of a few pairs: an interrupt between the two readings spoils one of them. */
void seg_pair(uint64_t *counter, uint64_t *mono_ns) {
  uint64_t best = UINT64_MAX;
  for (int i = 0; i < 8; i++) {
    uint64_t before = seg_ticks(), ns = seg_clock_ns(CLOCK_MONOTONIC), after = seg_ticks();
    if (after - before >= best) continue;
    best = after - before;
    *counter = before + best / 2;
    *mono_ns = ns;
  }
}

/* The name in field 2 may hold anything, also ") "; no field after it holds a bracket. */
uint64_t seg_start_ticks(void) {
  char text[1024];
  int fd = sys_open("/proc/self/stat", O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return 0;
  long n = sys_read(fd, text, sizeof(text) - 1);
  sys_close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  const char *at = strrchr(text, ')');
  for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
  uint64_t ticks = 0;
  if (at)
    for (at++; *at >= '0' && *at <= '9'; at++) ticks = ticks * 10 + (uint64_t)(*at - '0');
  return ticks;
}

static long read_file(const char *path, char *to, size_t bytes) {
  int fd = sys_open(path, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return 0;
  long n = sys_read(fd, to, bytes);
  sys_close(fd);
  return n > 0 ? n : 0;
}

void seg_introduce(struct seg_who *who) {
  struct stat ns;
  who->ppid = (uint32_t)syscall(SYS_getppid);
  memcpy(who->ranks, seg_set.ranks, sizeof(who->ranks));
  long n = read_file("/proc/self/comm", who->name, sizeof(who->name));
  if (n) who->name[n - 1] = 0;
  who->cmdline_bytes = (uint32_t)read_file("/proc/self/cmdline", who->cmdline, sizeof(who->cmdline));
  if (!syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/ns/pid", &ns, 0)) who->pid_ns = ns.st_ino;
}

void seg_identify(int fd, uint64_t *device, uint64_t *inode) {
  struct stat s;
  memset(&s, 0, sizeof(s));
  if (syscall(SYS_fstat, fd, &s)) s.st_ino = 0;
  *device = s.st_dev;
  *inode = s.st_ino;
}

bool seg_same_file(int fd, uint64_t device, uint64_t inode) {
  uint64_t d, i;
  seg_identify(fd, &d, &i);
  return i && d == device && i == inode;
}

static bool send_segment(int to, const struct seg_process *p) {
  struct seg_hello hello = {SEG_MAGIC, SEG_VERSION, p->header->pid, p->header->start_ticks};
  union {
    struct cmsghdr head;
    char room[CMSG_SPACE(sizeof(int))];
  } control;
  memset(&control, 0, sizeof(control));
  struct iovec body = {&hello, sizeof(hello)};
  struct msghdr message = {
      .msg_iov = &body, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)};
  struct cmsghdr *c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(c), &p->fd, sizeof(int));
  return syscall(SYS_sendmsg, to, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (long)sizeof(hello);
}

/* Never waits: an agent that is gone or busy is not told, and that is counted. */
void seg_hello(struct seg_process *p) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (!seg_set.socket[0]) return;
  memcpy(address.sun_path, seg_set.socket, sizeof(address.sun_path));
  int fd = (int)syscall(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  bool told = fd >= 0 && !syscall(SYS_connect, fd, &address, sizeof(address)) && send_segment(fd, p);
  if (fd >= 0) sys_close(fd);
  if (!told) __atomic_fetch_add(&p->header->losses[SEG_HELLO], 1, __ATOMIC_RELAXED);
}

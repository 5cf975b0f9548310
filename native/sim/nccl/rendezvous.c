/* How ranks find their shared memory: a memfd, handed over a socket whose name is made of the communicator's hash.
 *
 * Neither has a name in a file system: whatever state the ranks are killed in, nothing is left behind. The first who
 * comes makes the memory and hands it to the others; it is blocked until they came anyway.
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "shared.h"

enum { POLL_MS = 50, RETRY_NS = 500000 };

static size_t rounded(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

static void lay_out(struct room *room) {
  size_t ranks = (size_t)room->ranks, chunk = CHUNKS_BYTES / ranks / PAGE * PAGE;
  size_t head = rounded(sizeof(struct shared) + ranks * sizeof(struct member), PAGE);
  room->chunk = chunk > MAX_CHUNK ? MAX_CHUNK : chunk < PAGE ? PAGE : chunk;
  room->step = room->ranks > MANY_RANKS ? SMALL_STEP : LARGE_STEP;
  room->ring_bytes = rounded(sizeof(struct ring) + RING_SLOTS * room->step, PAGE);
  room->bytes = head + (ranks + 1) * room->chunk + ranks * ranks * room->ring_bytes;
  room->chunks = (char *)head; /* offsets until the memory is there */
  room->rings = (char *)head + (ranks + 1) * room->chunk;
}

static bool map(struct room *room, int file) {
  void *memory = mmap(NULL, room->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return false;
  /* A forked child is not a rank, and must not keep the memory alive. */
  madvise(memory, room->bytes, MADV_DONTFORK);
  room->shared = memory;
  room->chunks = (char *)memory + (size_t)room->chunks;
  room->rings = (char *)memory + (size_t)room->rings;
  return true;
}

static socklen_t name_of(uint64_t id, struct sockaddr_un *address) {
  *address = (struct sockaddr_un){.sun_family = AF_UNIX};
  int length =
      snprintf(address->sun_path + 1, sizeof(address->sun_path) - 1, "stallscope-nccl-%016llx", (unsigned long long)id);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static bool send_file(int to, int file) {
  char byte = 0;
  _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {0};
  struct iovec data = {&byte, 1};
  struct msghdr message = {
      .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
  struct cmsghdr *head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(head), &file, sizeof(file));
  return sendmsg(to, &message, MSG_NOSIGNAL) == 1;
}

/* -1: whoever had the memory is gone. */
static int receive_file(const struct room *room, int from) {
  char byte;
  _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {0};
  struct iovec data = {&byte, 1};
  struct msghdr message = {
      .msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
  struct pollfd readable = {.fd = from, .events = POLLIN};
  int file = -1;
  while (poll(&readable, 1, POLL_MS) == 0)
    if (sim_room_aborted(room)) return -1;
  if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != 1) return -1;
  struct cmsghdr *head = CMSG_FIRSTHDR(&message);
  if (head && head->cmsg_type == SCM_RIGHTS) memcpy(&file, CMSG_DATA(head), sizeof(file));
  return file;
}

static bool serve(const struct room *room, int listener, int file) {
  struct pollfd readable = {.fd = listener, .events = POLLIN};
  for (int served = 1; served < room->ranks;) {
    if (sim_room_aborted(room)) return false;
    if (poll(&readable, 1, POLL_MS) <= 0) continue;
    int joiner = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (joiner < 0) continue;
    served += send_file(joiner, file);
    close(joiner);
  }
  return true;
}

static bool host(struct room *room, int listener) {
  int file = memfd_create("stallscope-nccl", MFD_CLOEXEC);
  bool made = file >= 0 && ftruncate(file, (off_t)room->bytes) == 0 && map(room, file);
  if (made) room->shared->ranks = (uint32_t)room->ranks;
  bool served = made && listen(listener, room->ranks) == 0 && serve(room, listener, file);
  if (file >= 0) close(file);
  return served;
}

/* 1: in, 0: nobody is there (yet, or any more), -1: failed. */
static int join(struct room *room, int connection, const struct sockaddr_un *address, socklen_t length) {
  if (connect(connection, (const struct sockaddr *)address, length)) return 0;
  int file = receive_file(room, connection);
  if (file < 0) return 0;
  int result = map(room, file) ? 1 : -1;
  close(file);
  if (result == 1 && room->shared->ranks != (uint32_t)room->ranks) {
    errno = EINVAL;
    return -1;
  }
  return result;
}

/* 1: in, 0: try again, -1: failed. */
static int host_or_join(struct room *room, const struct sockaddr_un *address, socklen_t length) {
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  int result = join(room, fd, address, length);
  if (result == 0 && bind(fd, (const struct sockaddr *)address, length) == 0) result = host(room, fd) ? 1 : -1;
  close(fd);
  return result;
}

static bool find_others(struct room *room, uint64_t id) {
  const struct timespec retry = {0, RETRY_NS};
  struct sockaddr_un address;
  socklen_t length = name_of(id, &address);
  for (;;) {
    int result = sim_room_aborted(room) ? -1 : host_or_join(room, &address, length);
    if (result) return result > 0;
    nanosleep(&retry, NULL);
  }
}

static bool alone(struct room *room) {
  int file = memfd_create("stallscope-nccl", MFD_CLOEXEC);
  bool mapped = file >= 0 && ftruncate(file, (off_t)room->bytes) == 0 && map(room, file);
  if (file >= 0) close(file);
  return mapped;
}

bool sim_room_enter(struct room *room, uint64_t id, int rank, int ranks, const uint32_t *abort_flag) {
  *room = (struct room){.rank = rank, .ranks = ranks, .abort_flag = abort_flag};
  lay_out(room);
  return (ranks == 1 ? alone(room) : find_others(room, id)) && sim_gate_host(room);
}

void sim_room_leave(struct room *room) {
  if (room->shared) munmap(room->shared, room->bytes);
  room->shared = NULL;
}

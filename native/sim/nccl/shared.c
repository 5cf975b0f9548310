/* Waiting in shared memory: gates, bells, and the layout. */
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "shared.h"

/* An abort wakes its own waiters; this bounds the wait of one that was about to sleep at that moment. */
enum { POLL_NS = 50000000 };

void sim_futex_wait(const _Atomic uint32_t *word, uint32_t value, uint64_t nanoseconds) {
  struct timespec most = {(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &most, NULL, 0);
}

void sim_futex_wake(const _Atomic uint32_t *word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

bool sim_room_aborted(const struct room *room) {
  return __atomic_load_n(room->abort_flag, __ATOMIC_ACQUIRE) != 0;
}

static bool gate_wait(const struct room *room, struct gate *gate, uint32_t turn) {
  for (;;) {
    uint32_t open = atomic_load(&gate->open);
    if ((int32_t)(open - turn) >= 0) return true;
    if (sim_room_aborted(room)) return false;
    sim_futex_wait(&gate->open, open, POLL_NS);
  }
}

/* Nobody comes twice before all came once, so the n-th multiple of the number of ranks opens it for the n-th time. */
static bool gate_pass(const struct room *room, struct gate *gate, uint32_t *turn) {
  ++*turn;
  if (atomic_fetch_add(&gate->came, 1) + 1 == *turn * (uint32_t)room->ranks) {
    atomic_store(&gate->open, *turn);
    sim_futex_wake(&gate->open);
  }
  return gate_wait(room, gate, *turn);
}

bool sim_gate_device(struct room *room) {
  return gate_pass(room, &room->shared->device, &room->device_turn);
}

bool sim_gate_host(struct room *room) {
  return gate_pass(room, &room->shared->host, &room->host_turn);
}

void sim_room_wake(struct room *room) {
  sim_futex_wake(&room->shared->device.open);
  sim_futex_wake(&room->shared->host.open);
  sim_bell_ring(room, room->rank);
}

uint32_t sim_bell(const struct room *room) {
  return atomic_load(&room->shared->members[room->rank].bell);
}

void sim_bell_ring(const struct room *room, int rank) {
  _Atomic uint32_t *bell = &room->shared->members[rank].bell;
  atomic_fetch_add(bell, 1);
  sim_futex_wake(bell);
}

void sim_bell_wait(const struct room *room, uint32_t heard) {
  sim_futex_wait(&room->shared->members[room->rank].bell, heard, POLL_NS);
}

char *sim_chunk(const struct room *room, int rank) {
  return room->chunks + (size_t)rank * room->chunk;
}

struct ring *sim_ring(const struct room *room, int from, int to) {
  return (struct ring *)(room->rings + ((size_t)from * (size_t)room->ranks + (size_t)to) * room->ring_bytes);
}

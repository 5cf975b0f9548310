/* What the ranks of a communicator share: one piece of memory, and ways to wait in it that a dead rank can't break.
 *
 * There are no locks in it, only counters and futexes: whoever dies is simply somebody who does not come.
 */
#ifndef SIM_NCCL_SHARED_H
#define SIM_NCCL_SHARED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
  MAX_RANKS = 256,
  RING_SLOTS = 4,
  LARGE_STEP = 32 << 10,
  SMALL_STEP = 4 << 10, /* of more than MANY_RANKS ranks */
  MANY_RANKS = 16,
  CHUNKS_BYTES = 4 << 20, /* all chunks of a communicator together */
  MAX_CHUNK = 512 << 10,
  PAGE = 4096,
};

/* A door that opens when all ranks have come to it; it is used again and again. */
struct gate {
  _Atomic uint32_t came, open;
};

/* What a rank wants to do at a collective: all can see whether they want the same. */
struct offer {
  int function, root;
  uint64_t bytes;
};

struct member {
  struct offer offer;
  int color, key;
  _Atomic uint32_t bell; /* rung when something in a ring of this rank moved */
};

struct shared {
  uint32_t ranks;
  struct gate device, host; /* collectives; initialisation and splits */
  struct member members[];
};

/* One direction between two ranks: steps of at most `step` bytes. */
struct ring {
  _Atomic uint32_t sender_ready, receiver_ready; /* each side has used it once: both sides may connect */
  _Atomic uint32_t written, taken;
  uint32_t length[RING_SLOTS];
  char data[];
};

/* One rank's view. */
struct room {
  struct shared *shared;
  size_t bytes, chunk, step, ring_bytes;
  char *chunks, *rings;
  uint32_t device_turn, host_turn;
  int rank, ranks;
  const uint32_t *abort_flag;
};

/* rendezvous.c: false when aborted, or when memory or sockets fail (errno). */
bool sim_room_enter(struct room *room, uint64_t id, int rank, int ranks, const uint32_t *abort_flag);
void sim_room_leave(struct room *room);

/* shared.c: false when aborted. */
bool sim_room_aborted(const struct room *room);
bool sim_gate_device(struct room *room);
bool sim_gate_host(struct room *room);
void sim_room_wake(struct room *room);
uint32_t sim_bell(const struct room *room);
void sim_bell_ring(const struct room *room, int rank);
void sim_bell_wait(const struct room *room, uint32_t heard);
char *sim_chunk(const struct room *room, int rank); /* rank == ranks: the result's */
struct ring *sim_ring(const struct room *room, int from, int to);
void sim_futex_wait(const _Atomic uint32_t *word, uint32_t value, uint64_t nanoseconds);
void sim_futex_wake(const _Atomic uint32_t *word);

#endif

/* Collectives: all ranks meet, see whether they want the same, and pass their data on in chunks. */
#include <string.h>

#include "comm.h"

/* Sizes that differ by no more than this still fit the buffers on the way: everybody ends, with wrong numbers. */
enum { SLACK = 64 << 10, ALIGNMENT = 16 };

static size_t smaller(size_t a, size_t b) {
  return a < b ? a : b;
}

static struct room *room_of(const struct operation *op) {
  return &op->comm->state->room;
}

static bool is_average_of_reals(const struct operation *op) {
  return op->redop == ncclAvg && op->type >= ncclFloat16;
}

/* This rank's part into its own chunk, multiplied where the operation asks for it. */
static void put(const struct operation *op, size_t at_chunk, size_t at_send, size_t length) {
  char *chunk = sim_chunk(room_of(op), op->comm->rank) + at_chunk;
  union scalar factor = op->scale.value;
  size_t element = sim_type_bytes(op->type);
  if (op->scale.device) memcpy(&factor, op->scale.device, element);
  if (is_average_of_reals(op)) factor = sim_reciprocal(op->type, op->comm->nRanks);
  if (op->scale.used || is_average_of_reals(op))
    sim_scale(chunk, op->send + at_send, length / element, op->type, &factor);
  else memcpy(chunk, op->send + at_send, length);
}

/* Every rank adds up its share of what lies in the chunks. */
static void reduce_share(const struct operation *op, size_t length) {
  struct room *room = room_of(op);
  size_t element = sim_type_bytes(op->type), count = length / element, ranks = (size_t)room->ranks;
  size_t from = count * (size_t)room->rank / ranks, to = count * (size_t)(room->rank + 1) / ranks;
  char *result = sim_chunk(room, room->ranks);
  sim_reduce(result + from * element, sim_chunk(room, 0) + from * element, room->chunk, (unsigned)ranks, to - from,
             op->type, op->redop);
}

/* AllReduce, and Reduce, where only the root takes the result. */
static bool reduce(const struct operation *op, size_t bytes) {
  struct room *room = room_of(op);
  bool takes = op->function == ALL_REDUCE || op->root == room->rank;
  for (size_t at = 0; at < bytes; at += room->chunk) {
    size_t length = smaller(room->chunk, bytes - at);
    put(op, 0, at, length);
    if (!sim_gate_device(room)) return false;
    reduce_share(op, length);
    if (!sim_gate_device(room)) return false;
    if (takes) memcpy(op->recv + at, sim_chunk(room, room->ranks), length);
  }
  return true;
}

static bool reduce_scatter(const struct operation *op, size_t bytes) {
  struct room *room = room_of(op);
  size_t part = room->chunk / (size_t)room->ranks / ALIGNMENT * ALIGNMENT, element = sim_type_bytes(op->type);
  for (size_t at = 0; at < bytes; at += part) {
    size_t length = smaller(part, bytes - at);
    for (size_t rank = 0; rank < (size_t)room->ranks; rank++) put(op, rank * part, rank * op->bytes + at, length);
    if (!sim_gate_device(room)) return false;
    sim_reduce(op->recv + at, sim_chunk(room, 0) + (size_t)room->rank * part, room->chunk, (unsigned)room->ranks,
               length / element, op->type, op->redop);
    if (!sim_gate_device(room)) return false;
  }
  return true;
}

static bool all_gather(const struct operation *op, size_t bytes) {
  struct room *room = room_of(op);
  for (size_t at = 0; at < bytes; at += room->chunk) {
    size_t length = smaller(room->chunk, bytes - at);
    put(op, 0, at, length);
    if (!sim_gate_device(room)) return false;
    for (int rank = 0; rank < room->ranks; rank++)
      memcpy(op->recv + (size_t)rank * op->bytes + at, sim_chunk(room, rank), length);
    if (!sim_gate_device(room)) return false;
  }
  return true;
}

static bool broadcast(const struct operation *op, size_t bytes) {
  struct room *room = room_of(op);
  for (size_t at = 0; at < bytes; at += room->chunk) {
    size_t length = smaller(room->chunk, bytes - at);
    if (op->root == room->rank) put(op, 0, at, length);
    if (!sim_gate_device(room)) return false;
    memcpy(op->recv + at, sim_chunk(room, op->root), length);
    if (!sim_gate_device(room)) return false;
  }
  return true;
}

static bool move(const struct operation *op, size_t bytes) {
  switch (op->function) {
  case BROADCAST:
    return broadcast(op, bytes);
  case ALL_GATHER:
    return all_gather(op, bytes);
  case REDUCE_SCATTER:
    return reduce_scatter(op, bytes);
  default:
    return reduce(op, bytes);
  }
}

/* Whether the kernels of all ranks fit together; `bytes` is what all of them have. */
static bool agree(const struct operation *op, size_t *bytes) {
  const struct room *room = room_of(op);
  *bytes = op->bytes;
  for (int rank = 0; rank < room->ranks; rank++) {
    const struct offer *offer = &room->shared->members[rank].offer;
    if (offer->function != (int)op->function || offer->root != op->root) return false;
    *bytes = smaller(*bytes, offer->bytes);
  }
  return true;
}

/* What waits for data that nobody will send. */
static bool wait_for_abort(const struct operation *op) {
  const struct room *room = room_of(op);
  while (!sim_room_aborted(room)) sim_bell_wait(room, sim_bell(room));
  return false;
}

bool sim_collective(const struct operation *op) {
  struct room *room = room_of(op);
  size_t bytes;
  room->shared->members[room->rank].offer = (struct offer){(int)op->function, op->root, op->bytes};
  if (!sim_gate_device(room) || !sim_hinder(op)) return false;
  if (!agree(op, &bytes)) return wait_for_abort(op);
  if (!move(op, bytes)) return false;
  return op->bytes - bytes <= SLACK || wait_for_abort(op);
}

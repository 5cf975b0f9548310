/* Send and Recv: steps through a ring for each direction between two ranks, first come first served. */
#include <stdlib.h>
#include <string.h>

#include "comm.h"

struct transfer {
  const struct operation *op;
  struct ring *ring;
  size_t steps, step; /* how many, which is next */
  uint32_t last;      /* sender: `written` behind its last step */
  bool done;
};

static bool is_send(const struct operation *op) {
  return op->function == SEND;
}

static struct ring *ring_of(const struct operation *op) {
  const struct room *room = &op->comm->state->room;
  return is_send(op) ? sim_ring(room, room->rank, op->root) : sim_ring(room, op->root, room->rank);
}

/* The first use of a direction connects it: the host waits inside the call until the other side calls too. */
static void announce(const struct operation *op) {
  struct ring *ring = ring_of(op);
  _Atomic uint32_t *ready = is_send(op) ? &ring->sender_ready : &ring->receiver_ready;
  if (atomic_exchange(ready, 1) == 0) sim_bell_ring(&op->comm->state->room, op->root);
}

static bool await_peer(const struct operation *op) {
  const struct room *room = &op->comm->state->room;
  struct ring *ring = ring_of(op);
  _Atomic uint32_t *ready = is_send(op) ? &ring->receiver_ready : &ring->sender_ready;
  for (;;) {
    uint32_t heard = sim_bell(room);
    if (atomic_load(ready)) return true;
    if (sim_room_aborted(room)) return false;
    sim_bell_wait(room, heard);
  }
}

ncclResult_t sim_p2p_connect(const struct operation *operations, size_t count) {
  bool connected = true;
  for (size_t i = 0; i < count; i++)
    if (operations[i].function >= SEND) announce(&operations[i]);
  for (size_t i = 0; i < count && connected; i++)
    if (operations[i].function >= SEND) connected = await_peer(&operations[i]);
  return connected ? ncclSuccess : ncclInternalError;
}

static size_t eager_bytes(void) {
  static _Atomic size_t known; /* one more than the setting */
  size_t value = atomic_load(&known);
  if (!value) {
    const char *text = getenv("STALLSCOPE_SIM_NCCL_EAGER");
    value = 1 + (text ? strtoull(text, NULL, 10) : 0);
    atomic_store(&known, value);
  }
  return value - 1;
}

/* At least one step, so that an empty message is one too. */
static size_t steps_of(const struct operation *op) {
  size_t step = op->comm->state->room.step, steps = (op->bytes + step - 1) / step;
  return steps ? steps : 1;
}

static size_t length_of(const struct transfer *transfer) {
  size_t step = transfer->op->comm->state->room.step, at = transfer->step * step;
  size_t left = transfer->op->bytes - at;
  return left < step ? left : step;
}

static char *slot_of(const struct transfer *transfer, uint32_t number) {
  return transfer->ring->data + (size_t)(number % RING_SLOTS) * transfer->op->comm->state->room.step;
}

static bool write_step(struct transfer *transfer) {
  struct ring *ring = transfer->ring;
  uint32_t written = atomic_load(&ring->written);
  size_t length = length_of(transfer), at = transfer->step * transfer->op->comm->state->room.step;
  if (transfer->step == transfer->steps || written - atomic_load(&ring->taken) >= RING_SLOTS) return false;
  if (length) memcpy(slot_of(transfer, written), transfer->op->send + at, length);
  ring->length[written % RING_SLOTS] = (uint32_t)length;
  atomic_store(&ring->written, written + 1);
  transfer->step++;
  transfer->last = written + 1;
  return true;
}

/* A message of another size fills what it fills: the steps count, as on the real thing. */
static bool read_step(struct transfer *transfer) {
  struct ring *ring = transfer->ring;
  uint32_t taken = atomic_load(&ring->taken), available;
  size_t length = length_of(transfer), at = transfer->step * transfer->op->comm->state->room.step;
  if (transfer->step == transfer->steps || taken == atomic_load(&ring->written)) return false;
  available = ring->length[taken % RING_SLOTS];
  if (available < length) length = available;
  if (length) memcpy(transfer->op->recv + at, slot_of(transfer, taken), length);
  atomic_store(&ring->taken, taken + 1);
  transfer->step++;
  return true;
}

static bool has_ended(const struct transfer *transfer) {
  if (transfer->step < transfer->steps) return false;
  if (!is_send(transfer->op) || transfer->op->bytes <= eager_bytes()) return true;
  return (int32_t)(atomic_load(&transfer->ring->taken) - transfer->last) >= 0;
}

/* Whether anything moved or ended. */
static bool advance(struct transfer *transfer) {
  bool moved = false;
  while (is_send(transfer->op) ? write_step(transfer) : read_step(transfer)) moved = true;
  if (moved) sim_bell_ring(&transfer->op->comm->state->room, transfer->op->root);
  transfer->done = has_ended(transfer);
  return moved || transfer->done;
}

static bool is_first_of_its_way(const struct transfer *transfers, size_t index) {
  for (size_t i = 0; i < index; i++)
    if (!transfers[i].done && transfers[i].ring == transfers[index].ring &&
        transfers[i].op->function == transfers[index].op->function)
      return false;
  return true;
}

static bool advance_all(struct transfer *transfers, size_t count, size_t *open) {
  bool moved = false;
  for (size_t i = 0; i < count; i++) {
    if (transfers[i].done || !is_first_of_its_way(transfers, i)) continue;
    moved |= advance(&transfers[i]);
    *open -= transfers[i].done;
  }
  return moved;
}

static void run(struct room *room, struct transfer *transfers, size_t count) {
  size_t open = count;
  while (open && !sim_room_aborted(room)) {
    uint32_t heard = sim_bell(room);
    if (!advance_all(transfers, count, &open)) sim_bell_wait(room, heard);
  }
}

void sim_p2p(const struct operation *operations, size_t count) {
  struct transfer *transfers = sim_new((count + 1) * sizeof(*transfers));
  size_t used = 0;
  bool may_run = true;
  for (size_t i = 0; i < count && may_run; i++) {
    if (operations[i].function < SEND) continue;
    may_run = sim_hinder(&operations[i]);
    transfers[used++] =
        (struct transfer){.op = &operations[i], .ring = ring_of(&operations[i]), .steps = steps_of(&operations[i])};
  }
  if (may_run && used) run(&operations[0].comm->state->room, transfers, used);
  free(transfers);
}

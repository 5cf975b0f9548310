/* Faults by plan: lines of the file that STALLSCOPE_SIM_FAULTS names, read again when it has changed.
 *
 *     KIND [rank=R] [op=N] [comm=HASH] [name=NAME] [ns=N] [code=N]
 *
 * What is not named matches everything. Lines of other kinds belong to others.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "comm.h"

enum { MAX_FAULTS = 256, LOOK_EVERY_NS = 50000000, NAP_NS = 5000000 };
#define ANY INT64_MIN

struct fault {
  char kind[32], name[64];
  int64_t rank, operation, ns, code;
  uint64_t hash;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct fault faults[MAX_FAULTS];
static size_t fault_count;
static struct timespec read_at; /* mtime of what was read */
static off_t read_bytes;
static uint64_t looked_ns;

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void take_word(struct fault *fault, const char *word) {
  const char *equals = strchr(word, '=');
  size_t length = equals ? (size_t)(equals - word) : 0;
  if (!equals) return;
  if (length == 4 && memcmp(word, "rank", 4) == 0) fault->rank = strtoll(equals + 1, NULL, 0);
  if (length == 2 && memcmp(word, "op", 2) == 0) fault->operation = strtoll(equals + 1, NULL, 0);
  if (length == 2 && memcmp(word, "ns", 2) == 0) fault->ns = strtoll(equals + 1, NULL, 0);
  if (length == 4 && memcmp(word, "code", 4) == 0) fault->code = strtoll(equals + 1, NULL, 0);
  if (length == 4 && memcmp(word, "comm", 4) == 0) fault->hash = strtoull(equals + 1, NULL, 16);
  if (length == 4 && memcmp(word, "name", 4) == 0) snprintf(fault->name, sizeof(fault->name), "%s", equals + 1);
}

static void take_line(char *line) {
  struct fault fault = {.rank = ANY, .operation = ANY};
  char *rest, *word = strtok_r(line, " \t\r\n", &rest);
  if (!word || strncmp(word, "nccl.", 5) || fault_count == MAX_FAULTS) return;
  snprintf(fault.kind, sizeof(fault.kind), "%s", word + 5);
  while ((word = strtok_r(NULL, " \t\r\n", &rest))) take_word(&fault, word);
  faults[fault_count++] = fault;
}

static void read_file(const char *path) {
  char line[512];
  FILE *file = fopen(path, "re");
  fault_count = 0;
  if (!file) return;
  while (fgets(line, sizeof(line), file)) take_line(line);
  fclose(file);
}

/* With the lock held. */
static void look(const char *path) {
  struct stat status = {0};
  uint64_t now = now_ns();
  if (looked_ns && now - looked_ns < LOOK_EVERY_NS) return;
  looked_ns = now;
  if (stat(path, &status)) fault_count = 0;
  if (memcmp(&status.st_mtim, &read_at, sizeof(read_at)) == 0 && status.st_size == read_bytes) return;
  read_at = status.st_mtim;
  read_bytes = status.st_size;
  read_file(path);
}

static bool matches(const struct fault *fault, const struct ncclComm *comm, const char *kind, int64_t operation) {
  return strcmp(fault->kind, kind) == 0 && (fault->rank == ANY || fault->rank == comm->rank) &&
         (fault->operation == ANY || fault->operation == operation) &&
         (fault->hash == 0 || fault->hash == comm->commHash) &&
         (!fault->name[0] || strcmp(fault->name, comm->state->name) == 0);
}

/* Whether one is planned for that operation (-1: for the communicator); `out` gets its ns or code. */
bool sim_fault(const struct ncclComm *comm, const char *kind, int64_t operation, const char *value, uint64_t *out) {
  const char *path = getenv("STALLSCOPE_SIM_FAULTS");
  bool found = false;
  if (!path || !*path) return false;
  pthread_mutex_lock(&lock);
  look(path);
  for (size_t i = 0; i < fault_count && !found; i++) {
    found = matches(&faults[i], comm, kind, operation);
    if (found && out) *out = (uint64_t)(strcmp(value, "ns") == 0 ? faults[i].ns : faults[i].code);
  }
  pthread_mutex_unlock(&lock);
  return found;
}

static bool nap_until(const struct ncclComm *comm, uint64_t end_ns) {
  for (uint64_t now; (now = now_ns()) < end_ns;) {
    uint64_t left = end_ns - now < NAP_NS ? end_ns - now : NAP_NS;
    nanosleep(&(struct timespec){0, (long)left}, NULL);
    if (sim_aborted(comm)) return false;
  }
  return true;
}

void sim_hang_abort(const struct ncclComm *comm) {
  while (sim_fault(comm, "abort_hangs", -1, "ns", NULL)) nanosleep(&(struct timespec){0, NAP_NS}, NULL);
}

/* On the device, when the operation may move data: false when it was aborted. */
bool sim_hinder(const struct operation *op) {
  uint64_t ns = 0;
  while (sim_fault(op->comm, "never_completes", (int64_t)op->index, "ns", NULL))
    if (!nap_until(op->comm, now_ns() + NAP_NS)) return false;
  if (sim_fault(op->comm, "slow", (int64_t)op->index, "ns", &ns)) return nap_until(op->comm, now_ns() + ns);
  return !sim_aborted(op->comm);
}

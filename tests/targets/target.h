/* Shared by the test targets: exact tallies of the calls a program makes, and its own clock's view of its waits.
 *
 * A program names its functions once, `#define APIS(X) X(cudaMalloc) ...`, and includes this. Its last line of output
 * is one JSON object; a wait counts into `long_waits` when its own clock saw at least 200 us.
 */
#ifndef TARGET_H
#define TARGET_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LONG_WAIT_NS 200000u

#define TALLY_ENUM(api) API_##api,
#define TALLY_NAME(api) #api,
enum { APIS(TALLY_ENUM) API_COUNT };
static const char *const api_names[] = {APIS(TALLY_NAME)};

struct tally {
  uint64_t calls[API_COUNT], long_waits[API_COUNT], long_ns[API_COUNT];
};

static inline uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline void check(const char *api, int got, int wanted) {
  if (got != wanted) {
    fprintf(stderr, "%s returned %d, expected %d\n", api, got, wanted);
    _exit(1);
  }
}

static inline void tally_wait(struct tally *tally, int api, uint64_t duration_ns) {
  if (duration_ns >= LONG_WAIT_NS) {
    tally->long_waits[api]++;
    tally->long_ns[api] += duration_ns;
  }
}

/* One counted call; TIMED also looks at the clock round it. */
#define CALL(tally, api, ...)                                                                                          \
  do {                                                                                                                 \
    (tally)->calls[API_##api]++;                                                                                       \
    check(#api, (int)api(__VA_ARGS__), 0);                                                                             \
  } while (0)
#define TIMED(tally, api, ...)                                                                                         \
  do {                                                                                                                 \
    uint64_t from_ns = now_ns();                                                                                       \
    CALL(tally, api, __VA_ARGS__);                                                                                     \
    tally_wait(tally, API_##api, now_ns() - from_ns);                                                                  \
  } while (0)

static inline void tally_add(struct tally *sum, const struct tally *part) {
  for (int i = 0; i < API_COUNT; i++) {
    sum->calls[i] += part->calls[i];
    sum->long_waits[i] += part->long_waits[i];
    sum->long_ns[i] += part->long_ns[i];
  }
}

/* `"calls": {...}, "long_waits": {api: {"count": n, "total_ns": ns}}`, without the braces round it. */
static inline void tally_print(const char *prefix, const struct tally *tally) {
  const char *comma = "";
  printf("\"%scalls\": {", prefix);
  for (int i = 0; i < API_COUNT; i++) {
    if (tally->calls[i]) {
      printf("%s\"%s\": %llu", comma, api_names[i], (unsigned long long)tally->calls[i]);
      comma = ", ";
    }
  }
  printf("}, \"%slong_waits\": {", prefix);
  comma = "";
  for (int i = 0; i < API_COUNT; i++) {
    if (tally->long_waits[i]) {
      printf("%s\"%s\": {\"count\": %llu, \"total_ns\": %llu}", comma, api_names[i],
             (unsigned long long)tally->long_waits[i], (unsigned long long)tally->long_ns[i]);
      comma = ", ";
    }
  }
  printf("}");
}

static inline void say(const char *line) {
  puts(line);
  fflush(stdout);
}

/* Prints "ready" and waits for a line; an ended stdin ends the program. */
static inline void ready(void) {
  char line[64];
  say("ready");
  if (!fgets(line, sizeof(line), stdin)) exit(0);
}

static inline unsigned long argument(int argc, char **argv, int index, unsigned long otherwise) {
  return argc > index ? strtoul(argv[index], NULL, 10) : otherwise;
}

#endif

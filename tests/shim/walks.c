/* A thread state, frames and code objects as CPython has them, or broken in every way, for the shim's walk of stacks:
 * walks MODE THREADS CALLS. "ready" with the numbers of its layout as JSON, a line, then that many waits in each thread. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int plain(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
plain cudaDeviceSynchronize, cudaLaunchKernel;

struct code {
  uint64_t before[7], words[11];
};
struct table {
  uint64_t head[2], size, hash;
  char text[72];
};
struct frame {
  uint64_t code, previous, pad[5], instr;
  uint8_t more[24]; /* the owner is byte 70 */
};
struct state {
  uint64_t thread_id, frame;
};

#define FRAMES 5
static struct code codes[FRAMES];
static struct table tables[FRAMES];
static pthread_key_t key;
static const char *mode;
static long calls;

static uint64_t base(void) {
  uint64_t fs;
  __asm__("movq %%fs:0, %0" : "=r"(fs));
  return fs;
}

static uint64_t next(uint64_t *s) {
  *s ^= *s << 13;
  *s ^= *s >> 7;
  *s ^= *s << 17;
  return *s;
}

static void stack_of(struct state *state, struct frame *frames, int depth) {
  memset(frames, 0, FRAMES * sizeof(*frames));
  for (int i = 0; i < depth; i++) {
    frames[i].code = (uint64_t)(uintptr_t)&codes[i];
    frames[i].previous = i + 1 < depth ? (uint64_t)(uintptr_t)&frames[i + 1] : 0;
    frames[i].instr = frames[i].code + 1000 + (uint64_t)i;
  }
  state->thread_id = base();
  state->frame = (uint64_t)(uintptr_t)frames;
}

/* One word of it somewhere else: nowhere, at a page's edge, in itself. */
static void spoil(struct state *state, struct frame *frames, uint8_t *edge, uint64_t *s) {
  const uint64_t places[] = {0,      8, 1ull << 46, ~0ull, (uint64_t)(uintptr_t)(edge - 8), (uint64_t)(uintptr_t)frames,
                             next(s)};
  uint64_t place = places[next(s) % 7];
  switch (next(s) % 4) {
  case 0:
    state->frame = place;
    break;
  case 1:
    frames[next(s) % FRAMES].previous = place;
    break;
  case 2:
    frames[next(s) % FRAMES].code = place;
    break;
  default:
    pthread_setspecific(key, (void *)(uintptr_t)place);
  }
}

static void *waits(void *argument) {
  uint64_t s = 0x9e3779b97f4a7c15ull ^ ((uint64_t)(uintptr_t)argument << 20);
  struct state state;
  struct frame frames[FRAMES];
  uint8_t *edge = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (edge == MAP_FAILED || mprotect(edge + 4096, 4096, PROT_NONE)) exit(3);
  for (long i = 0; i < calls; i++) {
    stack_of(&state, frames, FRAMES);
    pthread_setspecific(key, &state);
    if (!strcmp(mode, "spoilt")) spoil(&state, frames, edge + 4096, &s);
    cudaDeviceSynchronize(0, 0, 0, 0, 0, 0, 0, 0);
    pthread_setspecific(key, NULL);
  }
  munmap(edge, 8192);
  return NULL;
}

static void make_codes(void) {
  for (int i = 0; i < FRAMES; i++) {
    for (int j = 0; j < 10; j++) codes[i].words[j] = (uint64_t)(100 * i + j);
    codes[i].words[10] = (uint64_t)(uintptr_t)&tables[i];
    tables[i].size = (uint64_t)(i * 17); /* 0 to 68: shorter than what is read of it */
    memset(tables[i].text, 'a' + i, sizeof(tables[i].text));
  }
}

static uint64_t place_of_key(void) {
  uint64_t mark = 0x5ca1ab1e;
  pthread_setspecific(key, &mark);
  for (uint64_t at = 0x300; at < 0x900; at += 8)
    if (*(uint64_t *)(uintptr_t)(base() + at) == (uint64_t)(uintptr_t)&mark) return at;
  exit(4);
}

int main(int argc, char **argv) {
  pthread_t threads[64];
  if (argc < 4) return 2;
  mode = argv[1];
  long count = atol(argv[2]);
  calls = atol(argv[3]);
  if (count > 64 || pthread_key_create(&key, NULL)) return 2;
  make_codes();
  cudaLaunchKernel(0, 1, 2, 3, 4, 5, 6, 7); /* makes the segment */
  printf("{\"tss_at\": %lu, \"codes\": [", (unsigned long)place_of_key());
  for (int i = 0; i < FRAMES; i++) printf("%s%lu", i ? ", " : "", (unsigned long)(uintptr_t)&codes[i]);
  printf("], \"tables\": [");
  for (int i = 0; i < FRAMES; i++) printf("%s%lu", i ? ", " : "", (unsigned long)(uintptr_t)&tables[i]);
  printf("]}\n");
  fflush(stdout);
  if (getchar() == EOF) return 0;
  for (long i = 0; i < count; i++)
    if (pthread_create(&threads[i], NULL, waits, (void *)(uintptr_t)(i + 1))) return 3;
  for (long i = 0; i < count; i++) pthread_join(threads[i], NULL);
  puts("done");
  fflush(stdout);
  getchar(); /* the test reads the segment first */
  return 0;
}

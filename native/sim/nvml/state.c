/* What the library is told to be: by STALLSCOPE_SIM_NVML=missing|fail|hang from its start, or while it runs by lines of
 * the file that STALLSCOPE_SIM_FAULTS names: `nvml.missing`, `nvml.fail`, `nvml.hang`, `nvml.throttle mask=M [device=N]`.
 * Lines of other kinds are others'. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "nvml.h"

enum { POLL_NS = 20000000, LINE_BYTES = 512 };

enum fault { FAULT_NONE, FAULT_MISSING, FAULT_FAIL, FAULT_HANG };
struct told {
  enum fault fault;
  uint64_t throttle;
};

static enum fault fault_named(const char *word) {
  static const char *const words[] = {[FAULT_MISSING] = "missing", [FAULT_FAIL] = "fail", [FAULT_HANG] = "hang"};
  for (int i = FAULT_MISSING; i <= FAULT_HANG; i++)
    if (strcmp(word, words[i]) == 0) return (enum fault)i;
  return FAULT_NONE;
}

static uint64_t number_after(const char *line, const char *key, uint64_t otherwise) {
  const char *found = strstr(line, key);
  return found ? strtoull(found + strlen(key), NULL, 0) : otherwise;
}

static void read_line(char *line, int device, struct told *told) {
  char *word = line + strspn(line, " \t");
  if (strncmp(word, "nvml.", 5) != 0) return;
  word += 5;
  char *rest = word + strcspn(word, " \t\r\n");
  if (*rest) *rest++ = '\0';
  enum fault fault = fault_named(word);
  if (fault > told->fault) told->fault = fault;
  if (strcmp(word, "throttle") == 0 && number_after(rest, "device=", (uint64_t)device) == (uint64_t)device)
    told->throttle |= number_after(rest, "mask=", 0);
}

static struct told told_now(int device) {
  const char *word = getenv("STALLSCOPE_SIM_NVML"), *path = getenv("STALLSCOPE_SIM_FAULTS");
  struct told told = {.fault = word ? fault_named(word) : FAULT_NONE};
  char line[LINE_BYTES];
  FILE *file = path && *path ? fopen(path, "re") : NULL;
  while (file && fgets(line, sizeof(line), file)) read_line(line, device, &told);
  if (file) fclose(file);
  return told;
}

int nvml_told(void) {
  struct told told;
  while ((told = told_now(-1)).fault == FAULT_HANG) nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
  if (told.fault == FAULT_MISSING) return NVML_ERROR_LIBRARY_NOT_FOUND;
  return told.fault == FAULT_FAIL ? NVML_ERROR_UNKNOWN : NVML_SUCCESS;
}

uint64_t nvml_told_throttle(int device) {
  return told_now(device).throttle;
}

/* Inside of the simulated NVML. */
#ifndef SIM_NVML_H
#define SIM_NVML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Numbers of the public nvmlReturn_t. */
enum {
  NVML_SUCCESS = 0,
  NVML_ERROR_UNINITIALIZED = 1,
  NVML_ERROR_INVALID_ARGUMENT = 2,
  NVML_ERROR_NOT_SUPPORTED = 3,
  NVML_ERROR_NOT_FOUND = 6,
  NVML_ERROR_INSUFFICIENT_SIZE = 7,
  NVML_ERROR_LIBRARY_NOT_FOUND = 12,
  NVML_ERROR_UNKNOWN = 999,
};

enum { NVML_MAX_DEVICES = 16, NVML_MAX_PROCESSES = 256 };

struct nvml_process {
  int pid;
  uint64_t used_bytes;
};

/* What all processes of this machine did to one device, up to a moment. */
struct nvml_usage {
  uint64_t at_ns;
  uint64_t worked_ns, held_ns;
  uint64_t used_bytes;
  bool busy_now, working_now;
  int process_count;
  struct nvml_process processes[NVML_MAX_PROCESSES];
};

/* usage.c */
int nvml_device_count(void);
uint64_t nvml_device_bytes(void);
void nvml_read(int device, struct nvml_usage *usage);
/* Shares of the last moments: of any work, and of work that draws power (a kernel that waits for another rank doesn't). */
void nvml_shares(int device, double *busy, double *working);

/* state.c: what the library was told to be; does not return while it is told to hang. */
int nvml_told(void);
uint64_t nvml_told_throttle(int device);

#endif

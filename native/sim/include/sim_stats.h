/* What a process says about its use of the simulated devices: written by the driver, read by the simulated NVML.
 *
 * Each process holds one of these in an anonymous file (memfd) named SIM_STATS_NAME, which a reader finds among the
 * process's descriptors. It is gone with the process, however that ends. All times are CLOCK_MONOTONIC.
 * Where STALLSCOPE_SIM_STATS names a folder, the file lies there, under the process's number and readable for all; the
 * folder's owner takes it away.
 */
#ifndef SIM_STATS_H
#define SIM_STATS_H

#include <stdatomic.h>
#include <stdint.h>

#define SIM_STATS_NAME "stallscope-sim-stats"
enum { SIM_STATS_MAGIC = 0x53545453, SIM_STATS_VERSION = 1, SIM_STATS_DEVICES = 16, SIM_STATS_PATH_BYTES = 4096 };

/* Kernels and copies have a known place in time: `worked_ns` is the length of all of them, what overlaps counted once,
 * up to `worked_until_ns`, which may lie ahead. What stands still in a stream until another rank comes has no known
 * end: `held_ns` is the length of what is over, `held_since_ns` the start of what is going on while `held` is not 0. */
struct sim_device_stats {
  _Atomic uint64_t worked_ns, worked_until_ns;
  _Atomic uint64_t endless_since_ns; /* a kernel that never ends; 0: none */
  _Atomic uint64_t held_ns, held_since_ns;
  _Atomic uint64_t used_bytes;
  atomic_int held, contexts;
};

struct sim_stats {
  uint32_t magic, version;
  int32_t pid, devices;
  char machine[64]; /* STALLSCOPE_SIM_MACHINE: processes with another word are on another machine */
  struct sim_device_stats device[SIM_STATS_DEVICES]; /* by physical number */
};

#endif

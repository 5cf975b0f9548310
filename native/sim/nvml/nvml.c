/* The functions of the simulated NVML. Names that are not here come from stubs/nvml.txt and say "not supported". */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvml.h"

typedef struct nvml_device *nvmlDevice_t; /* number + 1 */

enum { IDLE_MW = 65000, FULL_MW = 400000, IDLE_MHZ = 210, FULL_MHZ = 1410, MEMORY_MHZ = 1215, RESERVED_BYTES = 0 };
enum { REASON_IDLE = 1 };

static atomic_int users;

/* What every function does first. */
static int enter(void) {
  int told = nvml_told();
  return told ? told : atomic_load(&users) > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

static int number(nvmlDevice_t device) {
  uintptr_t value = (uintptr_t)device;
  return value >= 1 && value <= (uintptr_t)nvml_device_count() ? (int)value - 1 : -1;
}

/* NVML(name, (parameters), statement): needs an initialised library; `result` is what is returned. */
#define NVML(name, params, statement)                                                                                  \
  int name params;                                                                                                     \
  EXPORT int name params {                                                                                             \
    int result = enter();                                                                                              \
    if (result) return result;                                                                                         \
    statement;                                                                                                         \
    return result;                                                                                                     \
  }

/* DEVICE(name, (parameters), statement): also needs a valid `device`, whose number is `n`, and a pointer `out`. */
#define DEVICE(name, params, statement)                                                                                \
  NVML(name, params, {                                                                                                 \
    int n = number(device);                                                                                            \
    if (n < 0 || !out) return NVML_ERROR_INVALID_ARGUMENT;                                                             \
    statement;                                                                                                         \
  })

static int init(void) {
  int told = nvml_told();
  if (!told) atomic_fetch_add(&users, 1);
  return told;
}

int nvmlInit(void);
EXPORT int nvmlInit(void) {
  return init();
}

int nvmlInit_v2(void);
EXPORT int nvmlInit_v2(void) {
  return init();
}

int nvmlInitWithFlags(unsigned flags);
EXPORT int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  return init();
}

NVML(nvmlShutdown, (void), atomic_fetch_sub(&users, 1))

const char *nvmlErrorString(int error);
EXPORT const char *nvmlErrorString(int error) {
  switch (error) {
  case NVML_SUCCESS:
    return "Success";
  case NVML_ERROR_UNINITIALIZED:
    return "Uninitialized";
  case NVML_ERROR_INVALID_ARGUMENT:
    return "Invalid Argument";
  case NVML_ERROR_NOT_SUPPORTED:
    return "Not Supported";
  case NVML_ERROR_NOT_FOUND:
    return "Not Found";
  case NVML_ERROR_INSUFFICIENT_SIZE:
    return "Insufficient Size";
  case NVML_ERROR_LIBRARY_NOT_FOUND:
    return "NVML Shared Library Not Found";
  default:
    return "Unknown Error";
  }
}

static int text(char *out, unsigned length, const char *value) {
  if (!out || strlen(value) >= length) return out ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_ERROR_INVALID_ARGUMENT;
  memcpy(out, value, strlen(value) + 1);
  return NVML_SUCCESS;
}

/* the machine */
NVML(nvmlSystemGetDriverVersion, (char *out, unsigned length), result = text(out, length, "580.0.0-stallscope-sim"))
NVML(nvmlSystemGetNVMLVersion, (char *out, unsigned length), result = text(out, length, "13.580.0-stallscope-sim"))
NVML(nvmlSystemGetCudaDriverVersion, (int *out), *out = 13000)
NVML(nvmlSystemGetCudaDriverVersion_v2, (int *out), *out = 13000)
NVML(nvmlDeviceGetCount, (unsigned *out), *out = (unsigned)nvml_device_count())
NVML(nvmlDeviceGetCount_v2, (unsigned *out), *out = (unsigned)nvml_device_count())

/* handles and names */
static int handle_of(int n, nvmlDevice_t *out) {
  if (!out || n < 0 || n >= nvml_device_count()) return NVML_ERROR_INVALID_ARGUMENT;
  *out = (nvmlDevice_t)(uintptr_t)(n + 1);
  return NVML_SUCCESS;
}

/* The device's own number in the machine, as the driver has it: bus = number + 1. */
static int handle_by_bus(const char *id, nvmlDevice_t *out) {
  unsigned domain, bus;
  if (!id || sscanf(id, "%x:%x:", &domain, &bus) != 2) return NVML_ERROR_INVALID_ARGUMENT;
  return handle_of((int)bus - 1, out) ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

/* The driver's sixteen bytes "stallscope-sim-" + number, in the usual spelling. */
static void uuid_of(int n, char uuid[64]) {
  static const char base[] = "stallscope-sim-";
  int at = snprintf(uuid, 64, "GPU-");
  for (int i = 0; i < 16; i++) {
    unsigned byte = i < 15 ? (unsigned char)base[i] : (unsigned)n;
    at += snprintf(uuid + at, 64 - (size_t)at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", byte);
  }
}

static int handle_by_uuid(const char *wanted, nvmlDevice_t *out) {
  char uuid[64];
  for (int n = 0; wanted && n < nvml_device_count(); n++) {
    uuid_of(n, uuid);
    if (strcmp(uuid, wanted) == 0) return handle_of(n, out);
  }
  return wanted ? NVML_ERROR_NOT_FOUND : NVML_ERROR_INVALID_ARGUMENT;
}

NVML(nvmlDeviceGetHandleByIndex, (unsigned index, nvmlDevice_t *out), result = handle_of((int)index, out))
NVML(nvmlDeviceGetHandleByIndex_v2, (unsigned index, nvmlDevice_t *out), result = handle_of((int)index, out))
NVML(nvmlDeviceGetHandleByPciBusId, (const char *id, nvmlDevice_t *out), result = handle_by_bus(id, out))
NVML(nvmlDeviceGetHandleByPciBusId_v2, (const char *id, nvmlDevice_t *out), result = handle_by_bus(id, out))
NVML(nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice_t *out), result = handle_by_uuid(uuid, out))
DEVICE(nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned *out), *out = (unsigned)n)
DEVICE(nvmlDeviceGetMinorNumber, (nvmlDevice_t device, unsigned *out), *out = (unsigned)n)
DEVICE(nvmlDeviceGetBrand, (nvmlDevice_t device, int *out), *out = 0)
DEVICE(nvmlDeviceGetName, (nvmlDevice_t device, char *out, unsigned length),
       result = text(out, length, "stallscope simulated GPU"))
DEVICE(nvmlDeviceGetUUID, (nvmlDevice_t device, char *out, unsigned length), {
  char uuid[64];
  uuid_of(n, uuid);
  result = text(out, length, uuid);
})
DEVICE(nvmlDeviceGetSerial, (nvmlDevice_t device, char *out, unsigned length), {
  char serial[32];
  snprintf(serial, sizeof(serial), "SIM%010d", n);
  result = text(out, length, serial);
})
DEVICE(nvmlDeviceGetCudaComputeCapability, (nvmlDevice_t device, int *out, int *minor), {
  *out = 8;
  *minor = 0;
})

struct pci_info {
  char bus_id_legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};
static void pci_of(int n, struct pci_info *out) {
  *out = (struct pci_info){.bus = (unsigned)n + 1};
  snprintf(out->bus_id_legacy, sizeof(out->bus_id_legacy), "0000:%02X:00.0", ((unsigned)n + 1) & 0xff);
  snprintf(out->bus_id, sizeof(out->bus_id), "00000000:%02X:00.0", ((unsigned)n + 1) & 0xff);
}
DEVICE(nvmlDeviceGetPciInfo, (nvmlDevice_t device, struct pci_info *out), pci_of(n, out))
DEVICE(nvmlDeviceGetPciInfo_v2, (nvmlDevice_t device, struct pci_info *out), pci_of(n, out))
DEVICE(nvmlDeviceGetPciInfo_v3, (nvmlDevice_t device, struct pci_info *out), pci_of(n, out))
DEVICE(nvmlDeviceGetCurrPcieLinkGeneration, (nvmlDevice_t device, unsigned *out), *out = 4)
DEVICE(nvmlDeviceGetMaxPcieLinkGeneration, (nvmlDevice_t device, unsigned *out), *out = 4)
DEVICE(nvmlDeviceGetCurrPcieLinkWidth, (nvmlDevice_t device, unsigned *out), *out = 16)
DEVICE(nvmlDeviceGetMaxPcieLinkWidth, (nvmlDevice_t device, unsigned *out), *out = 16)

/* what goes on: utilisation counts a kernel that waits, power does not */
struct utilization {
  unsigned gpu, memory;
};

static double busy_share(int n) {
  double busy, working;
  nvml_shares(n, &busy, &working);
  return busy;
}

static double working_share(int n) {
  double busy, working;
  nvml_shares(n, &busy, &working);
  return working;
}

DEVICE(nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, struct utilization *out), {
  double busy;
  double working;
  nvml_shares(n, &busy, &working);
  out->gpu = (unsigned)(busy * 100 + 0.5);
  out->memory = (unsigned)(working * 50 + 0.5);
})
DEVICE(nvmlDeviceGetPowerUsage, (nvmlDevice_t device, unsigned *out),
       *out = (unsigned)(IDLE_MW + working_share(n) * 0.9 * (FULL_MW - IDLE_MW)))
DEVICE(nvmlDeviceGetPowerManagementLimit, (nvmlDevice_t device, unsigned *out), *out = FULL_MW)
DEVICE(nvmlDeviceGetPowerManagementDefaultLimit, (nvmlDevice_t device, unsigned *out), *out = FULL_MW)
DEVICE(nvmlDeviceGetEnforcedPowerLimit, (nvmlDevice_t device, unsigned *out), *out = FULL_MW)
DEVICE(nvmlDeviceGetTotalEnergyConsumption, (nvmlDevice_t device, unsigned long long *out), {
  struct nvml_usage usage;
  nvml_read(n, &usage);
  *out = usage.at_ns / 1000000000 * IDLE_MW + usage.worked_ns / 1000000000 * (FULL_MW - IDLE_MW);
})
DEVICE(nvmlDeviceGetTemperature, (nvmlDevice_t device, int sensor, unsigned *out),
       ((void)sensor, *out = 35 + (unsigned)(working_share(n) * 35)))
/* Clocks: 0 graphics, 1 SM, 2 memory, 3 video. A device at work, also one that waits, runs at full clocks. */
static unsigned clock_mhz(int n, int type, bool at_most) {
  if (type == 2) return MEMORY_MHZ;
  if (nvml_told_throttle(n) && !at_most) return FULL_MHZ / 2;
  return at_most || busy_share(n) > 0 ? FULL_MHZ : IDLE_MHZ;
}
DEVICE(nvmlDeviceGetClockInfo, (nvmlDevice_t device, int type, unsigned *out), *out = clock_mhz(n, type, false))
DEVICE(nvmlDeviceGetMaxClockInfo, (nvmlDevice_t device, int type, unsigned *out), *out = clock_mhz(n, type, true))
DEVICE(nvmlDeviceGetPerformanceState, (nvmlDevice_t device, int *out), *out = busy_share(n) > 0 ? 0 : 8)
static unsigned long long reasons(int n) {
  return nvml_told_throttle(n) | (busy_share(n) > 0 ? 0 : REASON_IDLE);
}
DEVICE(nvmlDeviceGetCurrentClocksThrottleReasons, (nvmlDevice_t device, unsigned long long *out), *out = reasons(n))
DEVICE(nvmlDeviceGetCurrentClocksEventReasons, (nvmlDevice_t device, unsigned long long *out), *out = reasons(n))
DEVICE(nvmlDeviceGetSupportedClocksThrottleReasons, (nvmlDevice_t device, unsigned long long *out), *out = 0x1ff)
DEVICE(nvmlDeviceGetSupportedClocksEventReasons, (nvmlDevice_t device, unsigned long long *out), *out = 0x1ff)

/* memory and processes */
struct memory_info {
  unsigned long long total, free, used;
};
struct memory_info_v2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
static struct memory_info memory_of(int n) {
  struct nvml_usage usage;
  nvml_read(n, &usage);
  unsigned long long total = nvml_device_bytes(), used = usage.used_bytes < total ? usage.used_bytes : total;
  return (struct memory_info){.total = total, .free = total - used, .used = used};
}
DEVICE(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, struct memory_info *out), *out = memory_of(n))
DEVICE(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, struct memory_info_v2 *out), {
  struct memory_info memory = memory_of(n);
  out->total = memory.total;
  out->reserved = RESERVED_BYTES;
  out->free = memory.free;
  out->used = memory.used;
})

struct process_info {
  unsigned pid;
  unsigned long long used_bytes;
  unsigned gpu_instance, compute_instance;
};
struct process_info_v1 {
  unsigned pid;
  unsigned long long used_bytes;
};

/* As NVML has it: too small an array gives the number needed. */
static int processes(int n, unsigned *count, char *infos, size_t info_bytes) {
  struct nvml_usage *usage = malloc(sizeof(*usage));
  if (!usage) return NVML_ERROR_UNKNOWN;
  nvml_read(n, usage);
  unsigned room = infos ? *count : 0;
  *count = (unsigned)usage->process_count;
  int result = room < *count ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
  for (unsigned i = 0; i < *count && !result; i++) {
    struct process_info info = {(unsigned)usage->processes[i].pid, usage->processes[i].used_bytes, -1u, -1u};
    memcpy(infos + i * info_bytes, &info, info_bytes);
  }
  free(usage);
  return result;
}
DEVICE(nvmlDeviceGetComputeRunningProcesses, (nvmlDevice_t device, unsigned *out, void *infos),
       result = processes(n, out, infos, sizeof(struct process_info_v1)))
DEVICE(nvmlDeviceGetComputeRunningProcesses_v2, (nvmlDevice_t device, unsigned *out, void *infos),
       result = processes(n, out, infos, sizeof(struct process_info)))
DEVICE(nvmlDeviceGetComputeRunningProcesses_v3, (nvmlDevice_t device, unsigned *out, void *infos),
       result = processes(n, out, infos, sizeof(struct process_info)))
DEVICE(nvmlDeviceGetGraphicsRunningProcesses, (nvmlDevice_t device, unsigned *out, void *infos),
       ((void)infos, *out = 0))
DEVICE(nvmlDeviceGetGraphicsRunningProcesses_v2, (nvmlDevice_t device, unsigned *out, void *infos),
       ((void)infos, *out = 0))
DEVICE(nvmlDeviceGetGraphicsRunningProcesses_v3, (nvmlDevice_t device, unsigned *out, void *infos),
       ((void)infos, *out = 0))

/* links between devices: none but PCIe */
NVML(nvmlDeviceGetNvLinkState, (nvmlDevice_t device, unsigned link, int *out), ((void)device, (void)link, *out = 0))
NVML(nvmlDeviceGetNvLinkCapability, (nvmlDevice_t device, unsigned link, int capability, unsigned *out),
     ((void)device, (void)link, (void)capability, *out = 0))
NVML(nvmlDeviceGetP2PStatus, (nvmlDevice_t device, nvmlDevice_t peer, int index, int *out),
     ((void)device, (void)peer, (void)index, *out = 0))
NVML(nvmlDeviceSetCpuAffinity, (nvmlDevice_t device), (void)device)
NVML(nvmlDeviceClearCpuAffinity, (nvmlDevice_t device), (void)device)

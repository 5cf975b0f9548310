/* Devices: what they say about themselves, and errors in words. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

enum { DRIVER_VERSION = 13000, SM_MAJOR = 8, SM_MINOR = 0 };

/* Attribute numbers of the public CUdevice_attribute; whatever is not listed is 0. */
static const int attributes[160] = {
    [1] = 1024,                                                                   /* threads per block */
    [2] = 1024,                                                                   /* block x, y, z */
    [3] = 1024,        [4] = 64,        [5] = 2147483647,                         /* grid x, y, z */
    [6] = 65535,       [7] = 65535,     [8] = 49152,                              /* shared memory per block */
    [9] = 65536,                                                                  /* constant memory */
    [10] = 32,                                                                    /* warp size */
    [11] = 2147483647, [12] = 65536,                                              /* registers per block */
    [13] = 1410000,    [14] = 512,      [15] = 1,         [16] = 108,             /* multiprocessors */
    [19] = 1,                                                                     /* can map host memory */
    [31] = 1,                                                                     /* concurrent kernels */
    [36] = 1215000,    [37] = 5120,     [38] = 41943040,  [39] = 2048,            /* threads per multiprocessor */
    [40] = 3,                                                                     /* copy engines */
    [41] = 1,                                                                     /* unified addressing */
    [51] = 32,         [75] = SM_MAJOR, [76] = SM_MINOR,  [78] = 1,               /* stream priorities */
    [79] = 1,          [80] = 1,        [81] = 167936,    [82] = 65536, [83] = 1, /* managed memory */
    [90] = 1,          [95] = 1,                                                  /* cooperative launch */
    [102] = 1,         [103] = 1,                                                 /* virtual memory, by descriptor */
    [125] = 1,                                                                    /* IPC events */
    [97] = 166912,     [99] = 1,                                                  /* host register */
    [106] = 32,        [111] = 1024,    [115] = 1,                                /* memory pools */
};

CUresult sim_cuDriverGetVersion(int *version) {
  if (!version) return CUDA_ERROR_INVALID_VALUE;
  *version = DRIVER_VERSION;
  return CUDA_SUCCESS;
}

static bool is_device(CUdevice device) {
  return device >= 0 && device < sim_config()->devices;
}

CUresult sim_cuDeviceGet(CUdevice *device, int ordinal) {
  if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult sim_cuDeviceGetCount(int *count) {
  if (!count) return CUDA_ERROR_INVALID_VALUE;
  *count = sim_config()->devices;
  return CUDA_SUCCESS;
}

CUresult sim_cuDeviceGetName(char *name, int length, CUdevice device) {
  if (!is_device(device) || !name || length < 1) return CUDA_ERROR_INVALID_VALUE;
  snprintf(name, (size_t)length, "stallscope simulated GPU");
  return CUDA_SUCCESS;
}

CUresult sim_cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
  if (!is_device(device) || !uuid) return CUDA_ERROR_INVALID_VALUE;
  memcpy(uuid->bytes, "stallscope-sim-", 15);
  uuid->bytes[15] = (char)sim_physical(device);
  return CUDA_SUCCESS;
}

CUresult sim_cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  return sim_cuDeviceGetUuid(uuid, device);
}

CUresult sim_cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  if (!is_device(device) || !bytes) return CUDA_ERROR_INVALID_VALUE;
  *bytes = sim_config()->device_bytes;
  return CUDA_SUCCESS;
}

CUresult sim_cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (!value || attribute < 1) return CUDA_ERROR_INVALID_VALUE;
  bool known = (size_t)attribute < sizeof(attributes) / sizeof(attributes[0]);
  *value = attribute == 33 ? sim_physical(device) + 1 : known ? attributes[attribute] : 0;
  return CUDA_SUCCESS;
}

CUresult sim_cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
  *major = SM_MAJOR;
  *minor = SM_MINOR;
  return is_device(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult sim_cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
  if (!is_device(device) || !text || length < 1) return CUDA_ERROR_INVALID_VALUE;
  snprintf(text, (size_t)length, "0000:%02X:00.0", (unsigned)sim_physical(device) + 1);
  return CUDA_SUCCESS;
}

CUresult sim_cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
  unsigned domain, bus;
  if (sscanf(text, "%x:%x:", &domain, &bus) != 2) return CUDA_ERROR_INVALID_DEVICE;
  for (int i = 0; i < sim_config()->devices; i++) {
    if (sim_physical(i) != (int)bus - 1) continue;
    *device = i;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

CUresult sim_cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
  *can = device != peer;
  return is_device(device) && is_device(peer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static const struct {
  CUresult error;
  const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult describe(CUresult error, const char **text, bool name) {
  for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++) {
    if (errors[i].error == error) {
      *text = name ? errors[i].name : errors[i].text;
      return CUDA_SUCCESS;
    }
  }
  *text = NULL;
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult sim_cuGetErrorString(CUresult error, const char **text) {
  return describe(error, text, false);
}

CUresult sim_cuGetErrorName(CUresult error, const char **text) {
  return describe(error, text, true);
}

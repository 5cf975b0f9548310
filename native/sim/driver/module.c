/* Modules, functions, launches. Code is never looked into: a module has every function that is asked for. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"

struct global {
  char *name;
  CUdeviceptr address;
  struct global *next;
};

struct CUmod_st {
  unsigned magic;
  struct CUfunc_st *functions;
  struct global *globals;
};

/* What a global of unknown size gets; untouched pages cost nothing. */
enum { GLOBAL_BYTES = 1 << 20 };

pthread_mutex_t sim_module_lock = PTHREAD_MUTEX_INITIALIZER;
_Thread_local uint64_t sim_next_kernel_ns;

static char *copy_text(const char *text) {
  size_t bytes = strlen(text) + 1;
  return memcpy(sim_new(bytes), text, bytes);
}

static struct CUfunc_st *function_new(const char *name, struct CUmod_st *module) {
  struct CUfunc_st *function = sim_new(sizeof(*function));
  *function = (struct CUfunc_st){.magic = MAGIC_FUNCTION, .module = module};
  function->name = copy_text(name);
  function->duration_ns = sim_kernel_ns(name);
  return function;
}

CUresult sim_stallscope_sim_function(CUfunction *func, const char *name) {
  if (!func || !name) return CUDA_ERROR_INVALID_VALUE;
  *func = function_new(name, NULL);
  return CUDA_SUCCESS;
}

CUresult sim_stallscope_sim_set_next_kernel_ns(uint64_t duration_ns) {
  sim_next_kernel_ns = duration_ns ? duration_ns : 1;
  return CUDA_SUCCESS;
}

CUresult sim_cuModuleLoadData(CUmodule *module, const void *image) {
  struct CUctx_st *context;
  CUresult error = sim_current(&context);
  if (error || !module || !image) return error ? error : CUDA_ERROR_INVALID_VALUE;
  *module = sim_new(sizeof(**module));
  (*module)->magic = MAGIC_MODULE;
  return CUDA_SUCCESS;
}

CUresult sim_cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, int *options, void **values) {
  (void)count;
  (void)options;
  (void)values;
  return sim_cuModuleLoadData(module, image);
}

CUresult sim_cuModuleLoad(CUmodule *module, const char *path) {
  if (!path || access(path, R_OK)) return path ? CUDA_ERROR_FILE_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
  return sim_cuModuleLoadData(module, path);
}

/* Handles of its functions may still be in somebody's cache: the memory stays, marked as no module. */
CUresult sim_cuModuleUnload(CUmodule module) {
  if (!IS_A(module, MAGIC_MODULE)) return CUDA_ERROR_INVALID_HANDLE;
  module->magic = 0;
  return CUDA_SUCCESS;
}

CUresult sim_cuModuleGetFunction(CUfunction *func, CUmodule module, const char *name) {
  if (!func || !name || !IS_A(module, MAGIC_MODULE)) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&sim_module_lock);
  struct CUfunc_st *found = module->functions;
  while (found && strcmp(found->name, name) != 0) found = found->next;
  if (!found) {
    found = function_new(name, module);
    found->next = module->functions;
    module->functions = found;
  }
  *func = found;
  pthread_mutex_unlock(&sim_module_lock);
  return CUDA_SUCCESS;
}

static CUresult global_new(struct CUmod_st *module, const char *name, struct global **out) {
  void *memory;
  CUresult error = sim_allocate(&memory, GLOBAL_BYTES, MEMORY_DEVICE);
  if (error) return error;
  *out = sim_new(sizeof(**out));
  **out = (struct global){.name = copy_text(name), .address = (CUdeviceptr)memory, .next = module->globals};
  module->globals = *out;
  return CUDA_SUCCESS;
}

CUresult sim_cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name) {
  CUresult error = CUDA_SUCCESS;
  if (!name || !IS_A(module, MAGIC_MODULE)) return CUDA_ERROR_INVALID_VALUE;
  pthread_mutex_lock(&sim_module_lock);
  struct global *found = module->globals;
  while (found && strcmp(found->name, name) != 0) found = found->next;
  if (!found) error = global_new(module, name, &found);
  if (!error && address) *address = found->address;
  if (!error && bytes) *bytes = GLOBAL_BYTES;
  pthread_mutex_unlock(&sim_module_lock);
  return error;
}

/* A library is a module and a kernel is a function: nothing here depends on the difference. */
CUresult sim_cuLibraryLoadData(CUlibrary *library, const void *code, int *jit, void **jit_values, unsigned jit_count,
                               int *options, void **values, unsigned count) {
  (void)jit;
  (void)jit_values;
  (void)jit_count;
  (void)options;
  (void)values;
  (void)count;
  if (!library || !code) return CUDA_ERROR_INVALID_VALUE;
  struct CUmod_st *module = sim_new(sizeof(*module));
  module->magic = MAGIC_MODULE;
  *library = (CUlibrary)module;
  return CUDA_SUCCESS;
}

CUresult sim_cuLibraryUnload(CUlibrary library) {
  return sim_cuModuleUnload((CUmodule)library);
}

CUresult sim_cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
  return sim_cuModuleGetFunction((CUfunction *)kernel, (CUmodule)library, name);
}

CUresult sim_cuLibraryGetModule(CUmodule *module, CUlibrary library) {
  *module = (CUmodule)library;
  return CUDA_SUCCESS;
}

CUresult sim_cuLibraryGetGlobal(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name) {
  return sim_cuModuleGetGlobal_v2(address, bytes, (CUmodule)library, name);
}

CUresult sim_cuKernelGetFunction(CUfunction *func, CUkernel kernel) {
  *func = (CUfunction)kernel;
  return CUDA_SUCCESS;
}

CUresult sim_cuFuncGetName(const char **name, CUfunction func) {
  if (!IS_A(func, MAGIC_FUNCTION)) return CUDA_ERROR_INVALID_HANDLE;
  *name = func->name;
  return CUDA_SUCCESS;
}

CUresult sim_cuKernelGetName(const char **name, CUkernel kernel) {
  return sim_cuFuncGetName(name, (CUfunction)kernel);
}

CUresult sim_cuFuncGetModule(CUmodule *module, CUfunction func) {
  if (!IS_A(func, MAGIC_FUNCTION)) return CUDA_ERROR_INVALID_HANDLE;
  *module = func->module;
  return CUDA_SUCCESS;
}

/* Public CUfunction_attribute: 0 threads per block, 4 registers, 5 PTX version, 6 binary version, 8 dynamic shared. */
CUresult sim_cuFuncGetAttribute(int *value, int attribute, CUfunction func) {
  static const int values[] = {[0] = 1024, [4] = 32, [5] = 80, [6] = 80, [8] = 49152};
  if (!value || attribute < 0 || !IS_A(func, MAGIC_FUNCTION)) return CUDA_ERROR_INVALID_VALUE;
  *value = (size_t)attribute < sizeof(values) / sizeof(values[0]) ? values[attribute] : 0;
  return CUDA_SUCCESS;
}

CUresult sim_cuFuncSetAttribute(CUfunction func, int attribute, int value) {
  (void)attribute;
  (void)value;
  return IS_A(func, MAGIC_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult sim_cuFuncSetCacheConfig(CUfunction func, int config) {
  return sim_cuFuncSetAttribute(func, 0, config);
}

CUresult sim_cuKernelGetAttribute(int *value, int attribute, CUkernel kernel, CUdevice device) {
  (void)device;
  return sim_cuFuncGetAttribute(value, attribute, (CUfunction)kernel);
}

CUresult sim_cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice device) {
  (void)device;
  return sim_cuFuncSetAttribute((CUfunction)kernel, attribute, value);
}

CUresult sim_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction func, int block_size, size_t smem) {
  (void)smem;
  if (!count || block_size < 1 || !IS_A(func, MAGIC_FUNCTION)) return CUDA_ERROR_INVALID_VALUE;
  *count = block_size > 1024 ? 0 : 2048 / block_size > 32 ? 32 : 2048 / block_size;
  return CUDA_SUCCESS;
}

CUresult sim_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, CUfunction func, int block_size,
                                                                  size_t smem, unsigned flags) {
  (void)flags;
  return sim_cuOccupancyMaxActiveBlocksPerMultiprocessor(count, func, block_size, smem);
}

static CUresult launch(CUfunction func, uint64_t blocks, uint64_t threads, CUstream handle) {
  struct CUstream_st *stream;
  CUresult error = sim_stream(handle, &stream);
  if (error || !IS_A(func, MAGIC_FUNCTION)) return error ? error : CUDA_ERROR_INVALID_HANDLE;
  if (!blocks || !threads || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
  struct op op = {.kind = OP_KERNEL, .duration_ns = func->duration_ns};
  if (sim_next_kernel_ns) {
    op.duration_ns = sim_next_kernel_ns;
    sim_next_kernel_ns = 0;
  }
  return sim_submit(stream, &op);
}

CUresult sim_cuLaunchKernel(CUfunction func, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                            unsigned bz, unsigned smem, CUstream stream, void **params, void **extra) {
  (void)smem;
  (void)params;
  (void)extra;
  return launch(func, (uint64_t)gx * gy * gz, (uint64_t)bx * by * bz, stream);
}

CUresult sim_cuLaunchCooperativeKernel(CUfunction func, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                       unsigned bz, unsigned smem, CUstream stream, void **params) {
  return sim_cuLaunchKernel(func, gx, gy, gz, bx, by, bz, smem, stream, params, NULL);
}

/* Events that the launch itself is to record: when all blocks have started, and programmatic completion. */
enum { ATTRIBUTE_PROGRAMMATIC_EVENT = 7, ATTRIBUTE_LAUNCH_COMPLETION_EVENT = 12 };

static CUresult record_attributes(const CUlaunchConfig *config) {
  const CUlaunchAttribute *attributes = config->attrs;
  CUresult error = CUDA_SUCCESS;
  for (unsigned i = 0; attributes && i < config->numAttrs && !error; i++)
    if (attributes[i].id == ATTRIBUTE_PROGRAMMATIC_EVENT || attributes[i].id == ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
      error = sim_cuEventRecord(attributes[i].event.event, config->hStream);
  return error;
}

CUresult sim_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction func, void **params, void **extra) {
  if (!config) return CUDA_ERROR_INVALID_VALUE;
  CUresult error =
      sim_cuLaunchKernel(func, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                         config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream, params, extra);
  return error ? error : record_attributes(config);
}

/* Memory that another process may map: what virtual memory handles and IPC handles are made of. */
#ifndef SIM_SHARED_H
#define SIM_SHARED_H

#include "engine.h"

enum { IPC_MEMORY = 0x4d435049, IPC_EVENT = 0x45435049 };

/* An anonymous file of that size; -1 where none can be had. */
int sim_shared_file(size_t bytes);
/* The handle of such a file; false where it can't be asked. */
bool sim_ipc_handle(struct ipc_handle *out, uint32_t magic, int fd, int device, size_t bytes);
/* The file behind a handle, opened in this process; -1: gone, or not such a handle. */
int sim_ipc_open(const struct ipc_handle *handle, uint32_t magic);

#endif

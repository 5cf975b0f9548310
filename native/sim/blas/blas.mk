# The stand-ins for cuBLAS. Neither driver nor runtime is linked in: they find the runtime that the program loaded.
BLAS_PRODUCTS := $(foreach major,12 13,$(LIB)/libcublas.so.$(major) $(LIB)/libcublasLt.so.$(major))
PRODUCTS += $(BLAS_PRODUCTS)
all: $(BLAS_PRODUCTS)

define BLAS_MAJOR
$(OBJ)/blas$(1)/%.o: blas/%.c blas/blas.h $(wildcard include/*)
	$$(call say,CC,$$< ($(1)))
	@mkdir -p $$(@D)
	$$(Q)$$(CC) $$(CFLAGS) $$(SIM_CFLAGS) -DBLAS_MAJOR=$(1) -c -o $$@ $$<

$(LIB)/libcublas.so.$(1): $(OBJ)/blas$(1)/launch.o $(OBJ)/blas$(1)/blas.o $(OBJ)/stubs/libcublas.o
$(LIB)/libcublasLt.so.$(1): $(OBJ)/blas$(1)/launch.o $(OBJ)/blas$(1)/blaslt.o $(OBJ)/stubs/libcublasLt.o
endef
$(eval $(call BLAS_MAJOR,12))
$(eval $(call BLAS_MAJOR,13))

$(OBJ)/stubs/libcublas.c: stubs/cublas.txt $(OBJ)/blas13/blas.o
$(OBJ)/stubs/libcublasLt.c: stubs/cublasLt.txt $(OBJ)/blas13/blaslt.o

$(OBJ)/libcublas%.map:
	@mkdir -p $(@D)
	$(Q)printf 'libcublas%s {\n global: cublas*; stallscope_sim_*;\n local: *;\n};\n' $* > $@

$(BLAS_PRODUCTS): $(LIB)/%: $(OBJ)/%.map
	$(call say,LD,$@)
	@mkdir -p $(@D)
	$(Q)$(LINK) -Wl,-soname,$* -Wl,--version-script=$< -o $@.tmp $(filter %.o,$^) && mv $@.tmp $@

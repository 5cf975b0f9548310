# What nobody wrote by hand: names from stubs/*.txt, less what the library's objects define.
PYTHON ?= python3

$(OBJ)/stubs/libcuda.c: stubs/cuda.txt $(ENGINE_OBJ) $(EXPORTS_OBJ)
$(OBJ)/stubs/libcudart12.c: stubs/cudart.txt $(RUNTIME12_OBJ)
$(OBJ)/stubs/libcudart13.c: stubs/cudart.txt $(RUNTIME13_OBJ)
$(OBJ)/stubs/%.c: gen_stubs.py
	$(call say,GEN,$@)
	@mkdir -p $(@D)
	$(Q)$(PYTHON) gen_stubs.py $(if $(findstring cudart,$@),--finish rt_finish) $(filter %.txt,$^) $@ $(filter %.o,$^)

$(OBJ)/stubs/%.o: $(OBJ)/stubs/%.c stubs/stub.h
	$(call say,CC,$<)
	$(Q)$(CC) $(CFLAGS) $(SIM_CFLAGS) -Istubs -c -o $@ $<

$(LIB)/libcuda.so.1: $(OBJ)/stubs/libcuda.o
$(LIB)/libcudart.so.12 $(LIB)/libcudart_static.a: $(OBJ)/stubs/libcudart12.o
$(LIB)/libcudart.so.13: $(OBJ)/stubs/libcudart13.o

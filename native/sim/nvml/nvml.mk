# The simulated NVML.
NVML_OBJ := $(patsubst nvml/%.c,$(OBJ)/nvml/%.o,$(wildcard nvml/*.c))
PRODUCTS += $(LIB)/libnvidia-ml.so.1
all: $(LIB)/libnvidia-ml.so.1

$(OBJ)/nvml/%.o: nvml/%.c nvml/nvml.h $(wildcard include/*)
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) $(SIM_CFLAGS) -c -o $@ $<

$(OBJ)/stubs/libnvidia-ml.c: stubs/nvml.txt $(NVML_OBJ)

$(LIB)/libnvidia-ml.so.1: nvml/nvml.map $(NVML_OBJ) $(OBJ)/stubs/libnvidia-ml.o
	$(call say,LD,$@)
	@mkdir -p $(@D)
	$(Q)$(LINK) -Wl,-soname,libnvidia-ml.so.1 -Wl,--version-script=$< -o $@.tmp $(filter %.o,$^) && mv $@.tmp $@

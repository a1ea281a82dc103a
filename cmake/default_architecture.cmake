# The architecture of the GPU in this machine, as nvidia-smi tells it, otherwise the H200's. For penstock's own builds only.

set(CMAKE_CUDA_ARCHITECTURES 90a)
find_program(PENSTOCK_NVIDIA_SMI nvidia-smi)
mark_as_advanced(PENSTOCK_NVIDIA_SMI)
if(PENSTOCK_NVIDIA_SMI)
    execute_process(
        COMMAND "${PENSTOCK_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
        OUTPUT_VARIABLE _penstock_capabilities
        RESULT_VARIABLE _penstock_smi_result
        ERROR_QUIET)
    if(_penstock_smi_result EQUAL 0)
        string(REGEX MATCHALL "[0-9]+\\.[0-9]+" _penstock_capabilities "${_penstock_capabilities}")
        string(REPLACE "." "" _penstock_capabilities "${_penstock_capabilities}")
        list(REMOVE_DUPLICATES _penstock_capabilities)
        # Hopper's warpgroup instructions exist only in the architecture-specific form.
        list(TRANSFORM _penstock_capabilities REPLACE "^90$" "90a")
        if(_penstock_capabilities)
            set(CMAKE_CUDA_ARCHITECTURES "${_penstock_capabilities}")
        endif()
    endif()
endif()
message(STATUS "penstock: CUDA architectures: ${CMAKE_CUDA_ARCHITECTURES}")

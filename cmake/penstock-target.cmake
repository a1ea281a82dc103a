# What the build tree and the installed package do alike. Included by CMakeLists.txt and by penstock-config.cmake.

# Folders of the CUDA Toolkit that hold CCCL's package; plain find_package looks there only when nvcc is on the path.
function(penstock_cccl_hints result)
    set(${result} "${CUDAToolkit_LIBRARY_DIR}/cmake" "${CUDAToolkit_LIBRARY_ROOT}/lib64/cmake"
                  "${CUDAToolkit_TARGET_DIR}/lib/cmake" "${CUDAToolkit_BIN_DIR}/../lib64/cmake" PARENT_SCOPE)
endfunction()

# Asks nvcc for C++20. It depends on the CMake that reads it, so it is never written into the exported targets: CMake before
# 3.25.2 does not know cuda_std_20. The feature is a minimum, the option is not, so the option is used only where the feature is
# missing. The expression serves projects, too, that enable CUDA only later.
function(penstock_require_cuda_cxx20 target)
    if("cuda_std_20" IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
        target_compile_features(${target} INTERFACE $<BUILD_INTERFACE:cuda_std_20>)
    else()
        target_compile_options(
            ${target} INTERFACE $<BUILD_INTERFACE:$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-std=c++20>>)
    endif()
endfunction()

# What penstock's own tests, examples and benchmarks need; a project that uses penstock never comes here unless it asks for them.

if(PROJECT_IS_TOP_LEVEL)
    get_property(_penstock_multi_config GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
    if(NOT CMAKE_BUILD_TYPE AND NOT _penstock_multi_config)
        set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
    endif()

    find_program(PENSTOCK_CCACHE ccache)
    mark_as_advanced(PENSTOCK_CCACHE)
    if(PENSTOCK_CCACHE)
        foreach(_penstock_language IN ITEMS CXX CUDA)
            if(NOT DEFINED CMAKE_${_penstock_language}_COMPILER_LAUNCHER)
                set(CMAKE_${_penstock_language}_COMPILER_LAUNCHER "${PENSTOCK_CCACHE}")
            endif()
        endforeach()
    endif()
endif()

set(PENSTOCK_HAS_CUDA OFF)
if(PENSTOCK_ENABLE_CUDA)
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
        if(PROJECT_IS_TOP_LEVEL AND NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
            include(cmake/default_architecture.cmake)
        endif()
        enable_language(CUDA)
        penstock_require_cuda_cxx20(penstock)
        set(PENSTOCK_HAS_CUDA ON)
    else()
        message(STATUS "penstock: nvcc was not found on the path: the host part alone is built")
    endif()
endif()

# Warnings are for penstock's own targets. CMAKE_COMPILE_WARNING_AS_ERROR (a preset sets it) makes errors of them.
add_library(penstock_development INTERFACE)
target_link_libraries(penstock_development INTERFACE penstock)
target_compile_options(
    penstock_development
    INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wno-sign-conversion>
              # g++ 12 warns of overlaps in std::string's operator+ that there are not (its bug 105651)
              $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>
              $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
if(TARGET penstock_checkpoint)
    target_link_libraries(penstock_development INTERFACE penstock_checkpoint)
else()
    message(FATAL_ERROR "penstock: tests, examples and benchmarks need nlohmann_json (Debian: nlohmann-json3-dev)")
endif()

# The folders that a file which includes penstock is compiled with, for the tests that call a compiler themselves. Compilers search
# /usr/include last by themselves; naming it would change the order.
set(_penstock_own_folder "${PROJECT_SOURCE_DIR}/include")
add_library(penstock_folders OBJECT EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/cmake/folders.cpp")
target_link_libraries(penstock_folders PRIVATE penstock_development)
set(PENSTOCK_COMPILER_FOLDERS
    --include "${_penstock_own_folder}" --system
    "$<JOIN:$<FILTER:$<TARGET_PROPERTY:penstock_folders,INCLUDE_DIRECTORIES>,EXCLUDE,^(${_penstock_own_folder}|/usr/include)$>,:>")

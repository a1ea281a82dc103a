# Configures SOURCE in BINARY against the package at PREFIX, builds it and runs the program `consumer`. NO_NVCC: as on a machine
# whose path holds no nvcc. OPTIONS: more arguments for the configuration, separated by |.

if(NO_NVCC)
    string(REPLACE ":" ";" path "$ENV{PATH}")
    set(without "")
    foreach(folder IN LISTS path)
        if(NOT EXISTS "${folder}/nvcc")
            list(APPEND without "${folder}")
        endif()
    endforeach()
    string(REPLACE ";" ":" without "${without}")
    set(ENV{PATH} "${without}")
endif()
unset(ENV{CUDACXX})
unset(ENV{CMAKE_PREFIX_PATH})

string(REPLACE "|" ";" OPTIONS "${OPTIONS}")
file(REMOVE_RECURSE "${BINARY}")
execute_process(
    COMMAND "${CMAKE_COMMAND}" -S "${SOURCE}" -B "${BINARY}" -G "${GENERATOR}" "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
            "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" "-DCMAKE_PREFIX_PATH=${PREFIX}" -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF
            "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON" ${OPTIONS}
    COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_COMMAND}" --build "${BINARY}" COMMAND_ERROR_IS_FATAL ANY)
if(EXISTS "${BINARY}/consumer")
    execute_process(COMMAND "${BINARY}/consumer" COMMAND_ERROR_IS_FATAL ANY)
endif()

# One runtime a program.
if(EXISTS "${BINARY}/build.ninja")
    file(STRINGS "${BINARY}/build.ninja" links REGEX "LINK_LIBRARIES = ")
    foreach(line IN LISTS links)
        if(line MATCHES "libcudart\\.so|-lcudart( |$)" AND line MATCHES "cudart_static")
            message(FATAL_ERROR "two CUDA runtimes in one program: ${line}")
        endif()
    endforeach()
endif()

# What the consumer has to say about the finished build.
if(EXISTS "${SOURCE}/check.cmake")
    include("${SOURCE}/check.cmake")
endif()

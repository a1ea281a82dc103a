# Headers in an absolute folder outside the prefix, data and libraries in nested folders: the consumer finds them all the same.

file(REMOVE_RECURSE "${WORK}")
execute_process(
    COMMAND "${CMAKE_COMMAND}" -S "${PENSTOCK_SOURCE}" -B "${WORK}/build" -G "${GENERATOR}" "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
            "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" -DPENSTOCK_BUILD_TESTS=OFF -DPENSTOCK_BUILD_EXAMPLES=OFF
            -DPENSTOCK_BUILD_BENCHMARKS=OFF "-DCMAKE_INSTALL_INCLUDEDIR=${WORK}/elsewhere/include"
            -DCMAKE_INSTALL_LIBDIR=lib/x86_64-linux-gnu -DCMAKE_INSTALL_DATADIR=lib/x86_64-linux-gnu/data
    COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${WORK}/build" --prefix "${WORK}/prefix" OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(REMOVE_RECURSE "${WORK}/build")
set(PREFIX "${WORK}/prefix")
set(BINARY "${WORK}/consumer")
set(OPTIONS "-Dpenstock_DIR=${PREFIX}/lib/x86_64-linux-gnu/data/cmake/penstock")
include("${CMAKE_CURRENT_LIST_DIR}/consume.cmake")

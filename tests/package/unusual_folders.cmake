# Headers in an absolute folder outside the prefix, data and libraries in nested folders: the consumer finds them all the same.

file(REMOVE_RECURSE "${WORK}")
# From a copy, which is deleted before the consumer comes: CMake refuses to export folders that lie below the source folder, and the
# build tree may do so.
file(COPY "${PENSTOCK_SOURCE}/CMakeLists.txt" "${PENSTOCK_SOURCE}/LICENSE" "${PENSTOCK_SOURCE}/cmake" "${PENSTOCK_SOURCE}/include"
     DESTINATION "${WORK}/source")
execute_process(
    COMMAND "${CMAKE_COMMAND}" -S "${WORK}/source" -B "${WORK}/build" -G "${GENERATOR}" "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}"
            "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}" -DPENSTOCK_BUILD_TESTS=OFF -DPENSTOCK_BUILD_EXAMPLES=OFF
            -DPENSTOCK_BUILD_BENCHMARKS=OFF "-DCMAKE_INSTALL_INCLUDEDIR=${WORK}/elsewhere/include"
            -DCMAKE_INSTALL_LIBDIR=lib/x86_64-linux-gnu -DCMAKE_INSTALL_DATADIR=lib/x86_64-linux-gnu/data
    COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${WORK}/build" --prefix "${WORK}/prefix" OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(REMOVE_RECURSE "${WORK}/build" "${WORK}/source")
set(PREFIX "${WORK}/prefix")
set(BINARY "${WORK}/consumer")
set(OPTIONS "-Dpenstock_DIR=${PREFIX}/lib/x86_64-linux-gnu/data/cmake/penstock")
include("${CMAKE_CURRENT_LIST_DIR}/consume.cmake")

# Each public header as a translation unit of its own: a .hpp as .cpp, a .cuh as .cu. Two more units take all headers, in both orders, the
# .hpp ones also for nvcc; they are linked into one program, which finds functions that are not inline. What a .hpp lacks to stand alone a
# C++ compiler finds in a tenth of nvcc's time. A unit of one header for nvcc is translated to PTX only: both of its compilers parse the
# whole file in any case, and the rest is most of the time.

set(_generated "${CMAKE_CURRENT_BINARY_DIR}/headers")

# penstock_header_unit(<result list> <path without extension> <extension> <headers...>): a file that includes them, written when it changes.
function(penstock_header_unit result stem extension)
    set(text "")
    foreach(header IN LISTS ARGN)
        string(APPEND text "#include <${header}>\n")
    endforeach()
    file(CONFIGURE OUTPUT "${_generated}/${stem}.${extension}" CONTENT "${text}" @ONLY)
    set(${result} ${${result}} "${_generated}/${stem}.${extension}" PARENT_SCOPE)
endfunction()

file(GLOB_RECURSE _host_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/include/penstock/*.hpp")
file(GLOB_RECURSE _cuda_headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/include/penstock/*.cuh")
list(SORT _host_headers)
list(SORT _cuda_headers)

set(_cxx_units "")
set(_cuda_units "")
foreach(_header IN LISTS _host_headers)
    string(MAKE_C_IDENTIFIER "${_header}" _stem)
    penstock_header_unit(_cxx_units ${_stem} cpp ${_header} ${_header})
endforeach()
foreach(_header IN LISTS _cuda_headers)
    string(MAKE_C_IDENTIFIER "${_header}" _stem)
    penstock_header_unit(_cuda_units ${_stem} cu ${_header} ${_header})
endforeach()
set(_all ${_host_headers} ${_cuda_headers})
set(_all_cxx_units "")
set(_all_cuda_units "")
penstock_header_unit(_all_cxx_units forwards cpp ${_host_headers})
penstock_header_unit(_all_cuda_units forwards cu ${_all})
list(REVERSE _host_headers)
list(REVERSE _all)
penstock_header_unit(_all_cxx_units backwards cpp ${_host_headers})
penstock_header_unit(_all_cuda_units backwards cu ${_all})

penstock_header_unit(_everything everything hpp ${_host_headers})
penstock_header_unit(_everything everything cuh ${_all})

add_library(penstock_headers_cxx OBJECT ${_cxx_units})
target_link_libraries(penstock_headers_cxx PRIVATE penstock_development)
target_compile_options(penstock_headers_cxx PRIVATE -O0)
if(PENSTOCK_HAS_CUDA)
    add_library(penstock_headers_cuda OBJECT ${_cuda_units})
    target_link_libraries(penstock_headers_cuda PRIVATE penstock_development)
    set_target_properties(penstock_headers_cuda PROPERTIES CUDA_PTX_COMPILATION ON)
else()
    set(_all_cuda_units "")
endif()

file(CONFIGURE OUTPUT "${_generated}/main.cpp" CONTENT "int main() { return 0; }\n" @ONLY)
add_executable(penstock_headers_linked "${_generated}/main.cpp" ${_all_cxx_units} ${_all_cuda_units})
target_link_libraries(penstock_headers_linked PRIVATE penstock_development)
target_compile_options(
    penstock_headers_linked PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-O0>)
add_test(NAME headers.linked COMMAND penstock_headers_linked)
set_tests_properties(headers.linked PROPERTIES LABELS compile)

# The second host compiler, where there is one.
find_program(PENSTOCK_CLANG NAMES clang++ clang++-14)
mark_as_advanced(PENSTOCK_CLANG)
if(PENSTOCK_CLANG AND NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    add_test(
        NAME headers.clang
        COMMAND Python3::Interpreter "${PROJECT_SOURCE_DIR}/tests/compile_fail/syntax.py" --compiler "${PENSTOCK_CLANG}"
                ${PENSTOCK_COMPILER_FOLDERS} -- ${_all_cxx_units})
    set_tests_properties(headers.clang PROPERTIES LABELS compile TIMEOUT 600)
endif()

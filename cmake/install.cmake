# The installed package: headers, targets and a relocatable config file. Nothing in it depends on an architecture.

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(_penstock_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/penstock")

# Not a file set: one whose destination is absolute is exported with a wrong path by CMake 3.25.
target_include_directories(penstock INTERFACE "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
install(TARGETS penstock EXPORT penstock-targets)
install(
    DIRECTORY "${PROJECT_SOURCE_DIR}/include/penstock" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
    FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
install(EXPORT penstock-targets NAMESPACE penstock:: DESTINATION "${_penstock_package_dir}")

# A component's target is defined by the config file from its dependencies, so that it exists whatever was installed at build time.
configure_package_config_file(
    cmake/penstock-config.cmake.in "${PROJECT_BINARY_DIR}/penstock-config.cmake"
    INSTALL_DESTINATION "${_penstock_package_dir}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(
    "${PROJECT_BINARY_DIR}/penstock-config-version.cmake" COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(
    FILES "${PROJECT_BINARY_DIR}/penstock-config.cmake" "${PROJECT_BINARY_DIR}/penstock-config-version.cmake"
          "${PROJECT_SOURCE_DIR}/cmake/penstock-target.cmake"
    DESTINATION "${_penstock_package_dir}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/licenses/penstock")

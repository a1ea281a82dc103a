# The installed package: headers, targets and a relocatable config file. Nothing in it depends on an architecture.

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(_penstock_package_dir "${CMAKE_INSTALL_DATADIR}/cmake/penstock")

install(TARGETS penstock EXPORT penstock-targets FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
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

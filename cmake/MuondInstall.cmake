# What `cmake --install` puts where, and the Debian packages: component `daemon` is the package
# muond, component `dev` is libmuond-dev.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Libraries are in `lib` under any prefix: files there find each other wherever they are moved.

set(CPACK_PACKAGE_CONTACT "the muond developers <muond@localhost>" CACHE STRING
  "Maintainer of the Debian packages")
find_program(MUOND_GZIP gzip REQUIRED)
find_program(MUOND_HELP2MAN help2man)
configure_file(deploy/deb/changelog.in "${CMAKE_BINARY_DIR}/changelog" @ONLY)
execute_process(COMMAND "${MUOND_GZIP}" -9nfk "${CMAKE_BINARY_DIR}/changelog"
  COMMAND_ERROR_IS_FATAL ANY)

# ---- daemon ------------------------------------------------------------------------------------
# All symbols are bound at start, and the table of them is then read-only.
foreach(program muond muonctl muond-bench)
  target_link_options(${program} PRIVATE LINKER:-z,relro,-z,now)
endforeach()
install(TARGETS muond muonctl muond-bench
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT daemon)
install(FILES deploy/systemd/muond@.service DESTINATION lib/systemd/system COMPONENT daemon)
install(PROGRAMS deploy/systemd/start-instance DESTINATION lib/muond COMPONENT daemon)
install(FILES deploy/systemd/sysusers.conf DESTINATION lib/sysusers.d RENAME muond.conf
  COMPONENT daemon)
install(FILES deploy/systemd/tmpfiles.conf DESTINATION lib/tmpfiles.d RENAME muond.conf
  COMPONENT daemon)
install(PROGRAMS deploy/tls/make-ca DESTINATION ${CMAKE_INSTALL_DATADIR}/muond/tls
  COMPONENT daemon)
install(DIRECTORY deploy/slurm DESTINATION ${CMAKE_INSTALL_DATADIR}/muond
  USE_SOURCE_PERMISSIONS COMPONENT daemon)
install(DIRECTORY docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT daemon
  FILES_MATCHING PATTERN "*.md" PATTERN "*.png")
foreach(package muond:daemon libmuond-dev:dev)
  string(REGEX REPLACE ":.*" "" name ${package})
  string(REGEX REPLACE ".*:" "" component ${package})
  install(FILES deploy/deb/copyright "${CMAKE_BINARY_DIR}/changelog.gz"
    DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${name} COMPONENT ${component})
  install(FILES deploy/deb/${name}.lintian-overrides RENAME ${name}
    DESTINATION ${CMAKE_INSTALL_DATADIR}/lintian/overrides COMPONENT ${component})
endforeach()
# Manual pages are what the programs say at --help, where help2man is there to write them down.
set(MUOND_PROGRAMS muond muonctl muond-bench)
list(TRANSFORM MUOND_PROGRAMS PREPEND "${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/")
if(MUOND_HELP2MAN)
  install(CODE "
    set(PROGRAMS \"${MUOND_PROGRAMS}\")
    set(HELP2MAN \"${MUOND_HELP2MAN}\")
    set(GZIP \"${MUOND_GZIP}\")
    set(DESTINATION \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_MANDIR}/man1\")
    include(\"${CMAKE_SOURCE_DIR}/cmake/install/manual.cmake\")
    " COMPONENT daemon)
endif()
# With the prefix /usr the configuration is in /etc, with any other below the prefix. Asked at
# installation, so that one build serves both.
install(CODE "
  set(muond_etc \"\${CMAKE_INSTALL_PREFIX}/etc\")
  if(CMAKE_INSTALL_PREFIX MATCHES \"(.*)/usr$\")
    set(muond_etc \"\${CMAKE_MATCH_1}/etc\")
  endif()
  file(INSTALL \"${CMAKE_SOURCE_DIR}/deploy/muond.conf\" DESTINATION \"\${muond_etc}/muond\")
  " COMPONENT daemon)

# ---- dev: the C++ client -------------------------------------------------------------------------
set(MUOND_CLIENT_TARGETS muond_client muond_nccl muond_nccl_cuda muond_proto muond_messages
  muond_values muond_tensor)
foreach(target ${MUOND_CLIENT_TARGETS} muond_flags)
  string(REPLACE "muond_" "" short ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${short})
endforeach()
install(TARGETS ${MUOND_CLIENT_TARGETS} muond_flags EXPORT muond
  ARCHIVE DESTINATION lib COMPONENT dev)
# Rooted as in the repository: #include "client/cpp/session.h" finds the same file here and there.
set(MUOND_INCLUDE ${CMAKE_INSTALL_INCLUDEDIR}/muond)
foreach(folder client/cpp nccl proto)
  install(DIRECTORY ${folder}/ DESTINATION ${MUOND_INCLUDE}/${folder} COMPONENT dev
    FILES_MATCHING PATTERN "*.h" PATTERN "fake*.h" EXCLUDE PATTERN "cuda" EXCLUDE
    PATTERN "*_internal.h" EXCLUDE PATTERN "v1" EXCLUDE PATTERN "muond" EXCLUDE)
endforeach()
install(FILES kernels/tensor.h DESTINATION ${MUOND_INCLUDE}/kernels COMPONENT dev)
install(DIRECTORY "${CMAKE_BINARY_DIR}/gen/muond" DESTINATION ${MUOND_INCLUDE} COMPONENT dev
  FILES_MATCHING PATTERN "*.h")
install(DIRECTORY proto/muond DESTINATION ${CMAKE_INSTALL_DATADIR}/muond/proto COMPONENT dev
  FILES_MATCHING PATTERN "*.proto")
install(DIRECTORY client/examples/remote DESTINATION ${CMAKE_INSTALL_DATADIR}/muond/examples
  COMPONENT dev)

set(MUOND_CMAKE_DIR lib/cmake/muond)
install(EXPORT muond NAMESPACE muond:: FILE muond-targets.cmake DESTINATION ${MUOND_CMAKE_DIR}
  COMPONENT dev)
write_basic_package_version_file("${CMAKE_BINARY_DIR}/muond-config-version.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES cmake/install/muond-config.cmake "${CMAKE_BINARY_DIR}/muond-config-version.cmake"
  DESTINATION ${MUOND_CMAKE_DIR} COMPONENT dev)
set(MUOND_CUDA_LIBS "")
if(MUOND_CUDA_FOUND)
  set(MUOND_CUDA_LIBS "-lcudart_static -ldl -lrt -lpthread")
endif()
configure_file(cmake/install/muond.pc.in "${CMAKE_BINARY_DIR}/muond.pc" @ONLY)
install(FILES "${CMAKE_BINARY_DIR}/muond.pc" DESTINATION lib/pkgconfig
  COMPONENT dev)

# ---- Debian packages: cpack -G DEB in the build folder -------------------------------------------
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME muond)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL daemon dev)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_DAEMON_PACKAGE_NAME muond)
set(CPACK_DEBIAN_DAEMON_PACKAGE_SECTION science)
set(CPACK_DEBIAN_DAEMON_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_DAEMON_PACKAGE_DEPENDS "systemd | systemd-standalone-sysusers")
set(CPACK_DEBIAN_DAEMON_PACKAGE_RECOMMENDS openssl)
set(CPACK_COMPONENT_DAEMON_DESCRIPTION
  "distributed optimizer service for Muon and AdamW
The daemon muond, the operator's tool muonctl, the benchmark muond-bench,
a systemd unit and scripts for Slurm.")
set(CPACK_DEBIAN_DAEMON_PACKAGE_CONTROL_EXTRA "${CMAKE_SOURCE_DIR}/deploy/deb/postinst"
  "${CMAKE_SOURCE_DIR}/deploy/deb/prerm" "${CMAKE_SOURCE_DIR}/deploy/deb/conffiles")
set(CPACK_DEBIAN_DEV_PACKAGE_NAME libmuond-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS
  "libgrpc++-dev, libprotobuf-dev, libabsl-dev, libisal-dev, libssl-dev, pkg-config")
set(CPACK_COMPONENT_DEV_DESCRIPTION
  "C++ client of the optimizer service muond
Headers, static libraries, CMake package, pkg-config file, protocol
definitions and an example.")
include(CPack)
cpack_add_component(daemon)
cpack_add_component(dev)

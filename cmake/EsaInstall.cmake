# SPDX-License-Identifier: Apache-2.0
# Installation: headers, both libraries, the command, a pkg-config file and a CMake package.
include(CMakePackageConfigHelpers)

# Everything that is installed, and nothing else: the tests need packages that a user may not have.
add_custom_target(esa_product DEPENDS esa esa_static)
foreach(part esa_cli esa_video esa_cuda)
  if(TARGET ${part})
    add_dependencies(esa_product ${part})
  endif()
endforeach()

file(GLOB ESA_HEADERS CONFIGURE_DEPENDS include/esa/*.h)
install(FILES ${ESA_HEADERS} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/esa)
install(TARGETS esa esa_static EXPORT esaTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
# Beside libesa, which looks for it there.
if(TARGET esa_cuda)
  install(TARGETS esa_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(TARGET esa_cli)
  install(TARGETS esa_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
# The engine, and the model that `esa generate` uses when it is given none.
if(ESA_VIDEO_FOUND)
  install(TARGETS esa_video LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(DIRECTORY models/wan-tiny DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/esa/models)
  # `esa evaluate` names it in a message.
  install(PROGRAMS tools/convert_lpips.py DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/esa/tools)
endif()

# The pkg-config file finds its prefix relative to itself, so the installed tree can be moved or staged.
# Folders that were given as absolute paths are written down as they are.
set(ESA_PC_PREFIX ${CMAKE_INSTALL_PREFIX})
foreach(folder LIBDIR INCLUDEDIR)
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${folder}}")
    set(ESA_PC_${folder} "${CMAKE_INSTALL_${folder}}")
  else()
    set(ESA_PC_${folder} "\${prefix}/${CMAKE_INSTALL_${folder}}")
  endif()
endforeach()
if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  file(RELATIVE_PATH ESA_PC_UP /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
  set(ESA_PC_PREFIX "\${pcfiledir}/${ESA_PC_UP}")
endif()
configure_file(cmake/esa.pc.in ${CMAKE_CURRENT_BINARY_DIR}/esa.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/esa.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(ESA_VIDEO_FOUND)
  configure_file(cmake/esa_video.pc.in ${CMAKE_CURRENT_BINARY_DIR}/esa_video.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/esa_video.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()

set(ESA_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/esa)
install(EXPORT esaTargets NAMESPACE esa:: DESTINATION ${ESA_PACKAGE_DIR})
configure_package_config_file(cmake/esaConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/esaConfig.cmake
                              INSTALL_DESTINATION ${ESA_PACKAGE_DIR})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/esaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/esaConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/esaConfigVersion.cmake
        DESTINATION ${ESA_PACKAGE_DIR})

# The Python package (pyproject.toml) holds the shared libraries in esa/lib, without links, which a wheel
# cannot carry, the command in esa/bin, and the build id that the libraries must have.
add_custom_target(esa_python DEPENDS esa)
foreach(part esa_cli esa_video esa_cuda)
  if(TARGET ${part})
    add_dependencies(esa_python ${part})
  endif()
endforeach()
if(SKBUILD)
  foreach(part esa esa_video esa_cuda)
    if(TARGET ${part})
      get_target_property(version ${part} SOVERSION)
      if(version)
        set_target_properties(${part} PROPERTIES VERSION ${version})
      endif()
      set_target_properties(${part} PROPERTIES INSTALL_RPATH "$ORIGIN")
      install(TARGETS ${part} LIBRARY DESTINATION esa/lib NAMELINK_SKIP COMPONENT python)
    endif()
  endforeach()
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/generated/esa_build.h DESTINATION esa/lib COMPONENT python)
  if(TARGET esa_cli)
    install(TARGETS esa_cli RUNTIME DESTINATION esa/bin COMPONENT python)
  endif()
endif()

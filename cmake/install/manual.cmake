# Manual pages of what the programs say at --help, made at installation. Wants PROGRAMS (their
# files), HELP2MAN, GZIP and DESTINATION, the folder of section 1.
set(about_muond "distributed optimizer service for Muon and AdamW")
set(about_muonctl "ask a muond daemon what its optimizer is doing")
set(about_muond-bench "time push, step and pull against a muond daemon")
file(MAKE_DIRECTORY "${DESTINATION}")
foreach(program IN LISTS PROGRAMS)
  get_filename_component(name "${program}" NAME)
  set(page "${DESTINATION}/${name}.1")
  execute_process(
    COMMAND "${HELP2MAN}" --no-info --section=1 "--name=${about_${name}}" "--output=${page}"
      "${program}"
    COMMAND_ERROR_IS_FATAL ANY)
  # Without a name and a time, so that the same build gives the same bytes.
  execute_process(COMMAND "${GZIP}" -9nf "${page}" COMMAND_ERROR_IS_FATAL ANY)
endforeach()

//! The text output of `image info` and `image check`, in the wording of `qemu-img`, and of `image snapshot list`,
//! `image bitmap list` and `image key list`.

use qcow::image::info::{BitmapInfo, EncryptInfo, SnapshotInfo};
use qcow::image::{CheckReport, ImageInfo, Severity};
use qcow::luks::LuksInfo;

use crate::size::human_short;

/// Returns the output of `image snapshot list`: a line for each snapshot, under a line of titles.
#[must_use]
pub fn snapshots(listed: &[SnapshotInfo], not_listed: u64) -> String {
    let rows = listed.iter().map(|snapshot| {
        let date = utc(u64::from(snapshot.date_sec));
        let state = human_short(snapshot.vm_state_size);
        [snapshot.id.clone(), date, state, snapshot.name.clone()]
    });
    let titles = ["ID", "DATE (UTC)", "VM STATE", "NAME"].map(str::to_owned);
    let rows: Vec<[String; 4]> = std::iter::once(titles).chain(rows).collect();
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let (id, state) = (width(0), width(2));
    let mut text: String = rows
        .iter()
        .map(|[at, date, size, name]| format!("{at:<id$}  {date:<19}  {size:>state$}  {name}\n"))
        .collect();
    if not_listed > 0 {
        text.push_str(&format!("… and {not_listed} more\n"));
    }
    text
}

/// Returns the output of `image bitmap list`: a line for each bitmap, under a line of titles.
#[must_use]
pub fn bitmaps(listed: &[BitmapInfo], not_listed: u64) -> String {
    let mut text = format!("{:>11}  {:<12}  NAME\n", "GRANULARITY", "FLAGS");
    for bitmap in listed {
        let (granularity, flags) = (bitmap.granularity, bitmap.flags.join(","));
        text.push_str(&format!("{granularity:>11}  {flags:<12}  {}\n", bitmap.name));
    }
    if not_listed > 0 {
        text.push_str(&format!("… and {not_listed} more\n"));
    }
    text
}

/// Returns a time as `YYYY-MM-DD HH:MM:SS`, from the seconds since the epoch.
fn utc(seconds: u64) -> String {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut days, rest) = (seconds / 86_400, seconds % 86_400);
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in [
        31,
        28 + u64::from(is_leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
    ] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!(
        "{year}-{month:02}-{:02} {hour:02}:{minute:02}:{second:02}",
        days + 1
    )
}

/// Calls `line` with each line of `image info` about encryption.
fn encryption(encrypt: &EncryptInfo, line: &mut impl FnMut(String)) {
    line("    encrypt:".to_owned());
    let Some(luks) = &encrypt.luks else {
        return line(format!("        format: {}", encrypt.format));
    };
    line(format!("        ivgen alg: {}", luks.ivgen_alg));
    line(format!("        detached header: {}", luks.detached_header));
    line(format!("        hash alg: {}", luks.hash_alg));
    line(format!("        cipher alg: {}", luks.cipher_alg));
    line(format!("        uuid: {}", luks.uuid));
    line(format!("        format: {}", encrypt.format));
    line(format!("        cipher mode: {}", luks.cipher_mode));
    line("        slots:".to_owned());
    for (index, slot) in luks.slots.iter().enumerate() {
        line(format!("            [{index}]:"));
        line(format!("                active: {}", slot.active));
        if let Some(iters) = slot.iters {
            line(format!("                iters: {iters}"));
        }
        line(format!("                key offset: {}", slot.key_offset));
        if let Some(stripes) = slot.stripes {
            line(format!("                stripes: {stripes}"));
        }
    }
    line(format!("        payload offset: {}", luks.payload_offset));
    line(format!("        master key iters: {}", luks.master_key_iters));
}

/// Returns the output of `image key list`: the slots in use.
#[must_use]
pub fn keys(luks: &LuksInfo) -> String {
    let mut text = format!(
        "{} {}-{}, {}\n",
        luks.cipher_alg, luks.cipher_mode, luks.ivgen_alg, luks.hash_alg
    );
    for (index, slot) in luks.slots.iter().enumerate() {
        if let Some(iters) = slot.iters {
            text.push_str(&format!("slot {index}: {iters} iterations\n"));
        }
    }
    text
}

/// Returns the output of `image info`.
#[must_use]
pub fn info(info: &ImageInfo) -> String {
    let mut text = String::new();
    let mut line = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    let on_off = |value: bool| if value { "true" } else { "false" };
    line(format!("image: {}", info.filename));
    line(format!("file format: {}", info.format));
    line(format!(
        "virtual size: {} ({} bytes)",
        human_short(info.virtual_size),
        info.virtual_size
    ));
    if let Some(bytes) = info.actual_size {
        line(format!("disk size: {}", human_short(bytes)));
    }
    if info.encrypted {
        line("encrypted: yes".to_owned());
    }
    line(format!("cluster_size: {}", info.cluster_size));
    if info.dirty_flag {
        line("cleanly shut down: no".to_owned());
    }
    if let Some(name) = &info.backing_filename {
        let path = info.full_backing_filename.as_ref().filter(|path| *path != name);
        let path = path.map_or_else(String::new, |path| format!(" (actual path: {path})"));
        line(format!("backing file: {name}{path}"));
    }
    if let Some(format) = &info.backing_filename_format {
        line(format!("backing file format: {format}"));
    }
    if !info.snapshots.is_empty() {
        line("Snapshot list:".to_owned());
        for snapshot in &info.snapshots {
            let state = human_short(snapshot.vm_state_size);
            line(format!(
                "    {}: {} (VM state {state})",
                snapshot.id, snapshot.name
            ));
        }
        if info.snapshots_not_listed > 0 {
            line(format!("    … and {} more", info.snapshots_not_listed));
        }
    }
    let data = &info.format_specific.data;
    line("Format specific information:".to_owned());
    line(format!("    compat: {}", data.compat));
    line(format!("    compression type: {}", data.compression_type));
    if let Some(value) = data.lazy_refcounts {
        line(format!("    lazy refcounts: {}", on_off(value)));
    }
    line(format!("    refcount bits: {}", data.refcount_bits));
    if let Some(value) = data.corrupt {
        line(format!("    corrupt: {}", on_off(value)));
    }
    if let Some(value) = data.extended_l2 {
        line(format!("    extended l2: {}", on_off(value)));
    }
    if let Some(file) = &data.data_file {
        line(format!("    data file: {file}"));
    }
    if let Some(value) = data.data_file_raw {
        line(format!("    data file raw: {}", on_off(value)));
    }
    if let Some(encrypt) = &data.encrypt {
        encryption(encrypt, &mut line);
    }
    for bitmap in &data.bitmaps {
        let flags = bitmap.flags.join(", ");
        line(format!(
            "    bitmap: {} (granularity {}; {flags})",
            bitmap.name, bitmap.granularity
        ));
    }
    if data.bitmaps_not_listed > 0 {
        line(format!("    … and {} more bitmaps", data.bitmaps_not_listed));
    }
    if let Some(reason) = &info.unsupported {
        line(format!("Ringdisk cannot serve this image: {reason}"));
    }
    text
}

/// Returns the output of `image check`.
#[must_use]
pub fn check(report: &CheckReport) -> String {
    let mut text = String::new();
    for finding in &report.findings {
        let kind = match finding.severity {
            Severity::Corruption => "ERROR",
            Severity::Leak => "Leaked",
            Severity::Error => "Could not check",
        };
        let (structure, offset, message) = (finding.structure, finding.offset, &finding.message);
        push(
            &mut text,
            format_args!("{kind} {structure} at {offset:#x}: {message}"),
        );
    }
    let told = report.findings.len() as u64;
    let found = report.corruptions + report.leaks + report.check_errors;
    if found > told {
        push(&mut text, format_args!("… and {} more", found - told));
    }
    if report.marked_corrupt {
        push(
            &mut text,
            format_args!(
                "The image is marked as corrupt; it can be opened for reading only, until it is repaired."
            ),
        );
    }
    if report.dirty {
        push(
            &mut text,
            format_args!("The image was not closed cleanly; refcounts are rebuilt when it is opened."),
        );
    }
    if found == 0 {
        push(&mut text, format_args!("No errors were found on the image."));
    }
    if report.corruptions > 0 {
        let count = report.corruptions;
        push(
            &mut text,
            format_args!("\n{count} errors were found on the image."),
        );
        push(
            &mut text,
            format_args!("Data may be corrupted, or further writes to the image may corrupt it."),
        );
    }
    if report.leaks > 0 {
        push(
            &mut text,
            format_args!("\n{} leaked clusters were found on the image.", report.leaks),
        );
        push(
            &mut text,
            format_args!("This means waste of disk space, but no harm to data."),
        );
    }
    if report.check_errors > 0 {
        push(
            &mut text,
            format_args!(
                "\n{} parts of the image could not be checked.",
                report.check_errors
            ),
        );
    }
    if report.total_clusters > 0 && report.allocated_clusters > 0 {
        let percent = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
        let (allocated, total) = (report.allocated_clusters, report.total_clusters);
        push(
            &mut text,
            format_args!(
                "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
                percent(allocated, total),
                percent(report.fragmented_clusters, allocated),
                percent(report.compressed_clusters, allocated),
            ),
        );
    }
    push(
        &mut text,
        format_args!("Image end offset: {}", report.image_end_offset),
    );
    text
}

/// Returns the text that precedes that of [`check`] after a repair.
#[must_use]
pub fn repaired(leaks: u64, corruptions: u64) -> String {
    if leaks + corruptions == 0 {
        return String::new();
    }
    format!(
        "The following inconsistencies were found and repaired:\n\n    {leaks} leaked clusters\n    {corruptions} \
         corruptions\n\nDouble checking the fixed image now...\n"
    )
}

fn push(text: &mut String, line: std::fmt::Arguments<'_>) {
    text.push_str(&line.to_string());
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use qcow::format::ClusterUse;
    use qcow::image::Finding;

    #[test]
    fn check_prints_a_clean_image_with_its_statistics() {
        let report = CheckReport {
            total_clusters: 16,
            allocated_clusters: 4,
            fragmented_clusters: 1,
            image_end_offset: 262_144,
            ..CheckReport::default()
        };
        assert_eq!(
            check(&report),
            "No errors were found on the image.\n\
             4/16 = 25.00% allocated, 25.00% fragmented, 0.00% compressed clusters\n\
             Image end offset: 262144\n"
        );
    }

    #[test]
    fn check_lists_counts_and_explains_findings() {
        let finding = |severity| Finding {
            severity,
            structure: ClusterUse::Unknown,
            offset: 0x1_0000,
            message: "is lost".to_owned(),
        };
        let report = CheckReport {
            corruptions: 2,
            leaks: 1,
            check_errors: 1,
            marked_corrupt: true,
            dirty: true,
            findings: vec![finding(Severity::Corruption), finding(Severity::Leak)],
            ..CheckReport::default()
        };
        let text = check(&report);
        for part in [
            "ERROR cluster at 0x10000: is lost\nLeaked cluster at 0x10000: is lost\n… and 2 more\n",
            "marked as corrupt",
            "not closed cleanly",
            "2 errors were found on the image.\nData may be corrupted",
            "1 leaked clusters were found on the image.\nThis means waste",
            "1 parts of the image could not be checked.",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
        assert!(!text.contains("No errors"));
    }

    #[test]
    fn utc_knows_leap_years_and_the_ends_of_months() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_704_067_199, "2023-12-31 23:59:59"),
            (1_709_251_200, "2024-03-01 00:00:00"),
            (u64::from(u32::MAX), "2106-02-07 06:28:15"),
        ] {
            assert_eq!(super::utc(seconds), expected);
        }
    }
}

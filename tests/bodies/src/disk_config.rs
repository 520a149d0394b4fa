//! The text of a `--disk`: nothing panics, what is accepted is within what is documented, and survives being printed
//! and parsed again.

use std::fmt::Write;

use block::lock::LockGranularity;
use qcow::{BitmapStorage, SnapshotSelector};
use vmm::disk_config::{
    DiskConfig, GroupMember, ImageType, MAX_POLL_US, MAX_QUEUES, MAX_SERIAL_BYTES, MIN_L2_CACHE_BYTES,
    WriteErrors,
};

/// Parses the bytes as text; those that are no UTF-8 as what they resemble.
///
/// # Panics
///
/// If that does not hold.
pub fn body(bytes: &[u8]) -> &'static str {
    let text = String::from_utf8_lossy(bytes);
    let config = match DiskConfig::parse(&text) {
        Ok(config) => config,
        Err(error) => {
            assert!(error.to_string().starts_with("--disk"), "{error}");
            return "refused";
        }
    };
    assert_within_limits(&config);
    let Some(printed) = print(&config) else {
        return "accepted";
    };
    let again = DiskConfig::parse(&printed);
    assert_eq!(again.as_ref(), Ok(&config), "{printed:?}");
    "printed"
}

fn assert_within_limits(config: &DiskConfig) {
    assert!(!config.path.as_os_str().is_empty());
    assert!((1..=MAX_QUEUES).contains(&config.num_queues));
    assert!(config.queue_size.is_power_of_two() && config.queue_size >= 4);
    assert!(!config.name().is_empty());
    if let Some(serial) = &config.serial {
        assert!(!serial.is_empty() && serial.len() <= MAX_SERIAL_BYTES && serial.is_ascii());
    }
    let queues: Vec<u16> = config.queue_affinity.iter().map(|entry| entry.queue).collect();
    for entry in &config.queue_affinity {
        assert!(entry.queue < config.num_queues && !entry.cpus.is_empty());
        assert!(entry.cpus.iter().all(|&cpu| cpu < 1024));
        assert!(config.cpus_of(entry.queue).is_some());
        let same = queues.iter().filter(|&&queue| queue == entry.queue);
        assert_eq!(same.count(), 1);
    }
    assert!(
        config
            .l2_cache_bytes
            .is_none_or(|bytes| bytes >= MIN_L2_CACHE_BYTES)
    );
    assert!(config.poll_us.is_none_or(|time| time <= MAX_POLL_US));
    assert!(!(config.readonly && config.werror == WriteErrors::Wait));
    assert!(!(config.readonly && config.bitmaps == BitmapStorage::Durable));
    assert!(!(config.readonly && config.overlay.is_some()));
}

/// A text that means `config`; `None` if there is none, as nothing quotes a quote.
fn print(config: &DiskConfig) -> Option<String> {
    let path = config.path.to_str()?;
    let group = config.rate_limit_group.as_ref().map(GroupMember::id);
    let snapshot = config.snapshot.as_ref().map(|which| match which {
        SnapshotSelector::Id(id) => format!("id={id}"),
        SnapshotSelector::Name(name) => format!("name={name}"),
        SnapshotSelector::Any(text) => text.clone(),
    });
    let overlay_dir = config
        .overlay
        .as_ref()
        .and_then(|overlay| overlay.directory.as_ref());
    let overlay_dir = overlay_dir.map(|path| path.to_str().ok_or(())).transpose().ok()?;
    let names = [
        Some(path),
        config.id.as_deref(),
        config.serial.as_deref(),
        group,
        snapshot.as_deref(),
        overlay_dir,
    ];
    if names.iter().flatten().any(|name| name.contains('"')) {
        return None;
    }
    let on_off = |on| if on { "on" } else { "off" };
    let slot = config.pci.device_id.map(|slot| format!(",pci_device_id={slot}"));
    let mut place = slot.unwrap_or_default();
    for (given, text) in [
        (config.pci.segment, ",pci_segment=0"),
        (config.pci.no_iommu, ",iommu=off"),
    ] {
        place.push_str(if given { text } else { "" });
    }
    if config.vhost_user {
        let id = config.id.as_ref().map(|id| format!(",id=\"{id}\""));
        return Some(format!(
            "vhost_user=on,socket=\"{path}\",num_queues={},queue_size={}{}{place}",
            config.num_queues,
            config.queue_size,
            id.unwrap_or_default()
        ));
    }
    let mut text = format!(
        "path=\"{path}\",readonly={},direct={},num_queues={},queue_size={},sparse={}{place}",
        on_off(config.readonly),
        on_off(config.direct),
        config.num_queues,
        config.queue_size,
        on_off(config.sparse),
    );
    let mut add = |key: &str, value: Option<String>| {
        if let Some(value) = value {
            write!(text, ",{key}={value}").expect("memory");
        }
    };
    add("image_type", config.image_type.map(|kind| kind.to_string()));
    add("id", config.id.as_ref().map(|id| format!("\"{id}\"")));
    add(
        "serial",
        config.serial.as_ref().map(|serial| format!("\"{serial}\"")),
    );
    let granularity = match config.lock_granularity {
        LockGranularity::ByteRange => "byte-range",
        LockGranularity::Full => "full",
    };
    add("lock_granularity", Some(granularity.to_owned()));
    add("rate_limit_group", group.map(|group| format!("\"{group}\"")));
    let limits = config.rate_limits;
    for (name, rate) in [("bw", limits.bandwidth), ("ops", limits.ops)] {
        let key = |key| format!("{name}_{key}");
        add(&key("size"), rate.map(|rate| rate.size.to_string()));
        let refill = rate.map(|rate| rate.refill.as_millis().to_string());
        add(&key("refill_time"), refill);
        // A burst of nothing is none.
        let burst = rate.map(|rate| rate.one_time_burst).filter(|&burst| burst > 0);
        add(&key("one_time_burst"), burst.map(|burst| burst.to_string()));
    }
    let wait = config.werror == WriteErrors::Wait;
    add("werror", Some(if wait { "wait" } else { "report" }.to_owned()));
    add("poll_us", config.poll_us.map(|time| time.to_string()));
    add("snapshot", snapshot.map(|which| format!("\"{which}\"")));
    add("overlay", config.overlay.as_ref().map(|_| "temporary".to_owned()));
    add("overlay_dir", overlay_dir.map(|path| format!("\"{path}\"")));
    let is_raw = config.image_type == Some(ImageType::Raw);
    if !is_raw {
        add("backing_files", Some(on_off(config.backing_files).to_owned()));
        add("data_file", Some(on_off(config.data_file).to_owned()));
    }
    if !is_raw || config.overlay.is_some() {
        add(
            "discard_no_unref",
            Some(on_off(config.discard_no_unref).to_owned()),
        );
        add("l2_cache", config.l2_cache_bytes.map(|bytes| bytes.to_string()));
    }
    let is_durable = config.bitmaps == BitmapStorage::Durable;
    add("bitmaps", is_durable.then(|| "durable".to_owned()));
    let affinity = config.queue_affinity.iter().map(|entry| {
        let cpus: Vec<String> = entry.cpus.iter().map(ToString::to_string).collect();
        format!("{}@[{}]", entry.queue, cpus.join(","))
    });
    let affinity: Vec<String> = affinity.collect();
    add(
        "queue_affinity",
        (!affinity.is_empty()).then(|| format!("[{}]", affinity.join(","))),
    );
    Some(text)
}
